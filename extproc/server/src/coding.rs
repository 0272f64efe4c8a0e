//! Content encodings: undone for inspection, with a cap on what may come out.

use std::borrow::Cow;
use std::io::Read;

use flate2::bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use sallyport_engine::TransportFailure;

/// An honest page or API answer deflates by less than this; zeros deflate by about 1,000.
const MAX_RATIO: usize = 200;
/// A body below this may unpack by any ratio: a small one costs nothing, and short JSON repeats itself.
const RATIO_FREE: usize = 64 << 10;

/// How a body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Identity,
    Gzip,
    Deflate,
    /// One we can't undo, or several on top of each other.
    Other,
}

impl Coding {
    /// What the headers declare.
    pub(crate) fn of(headers: &[(String, String)]) -> Self {
        let mut coding = Self::Identity;
        let values = headers.iter().filter(|(n, _)| n == "content-encoding").flat_map(|(_, v)| v.split(','));
        for one in values.map(str::trim).filter(|v| !v.is_empty()) {
            let one = match () {
                () if one.eq_ignore_ascii_case("identity") => continue,
                () if one.eq_ignore_ascii_case("gzip") || one.eq_ignore_ascii_case("x-gzip") => Self::Gzip,
                () if one.eq_ignore_ascii_case("deflate") => Self::Deflate,
                () => Self::Other,
            };
            coding = if coding == Self::Identity { one } else { Self::Other };
        }
        if charsets(headers).all(|c| readable(&c)) { coding } else { Self::Other }
    }

    /// At most so many bytes come out of `len` encoded ones before decoding gives up.
    pub(crate) fn most(self, len: usize, cap: usize) -> usize {
        match self {
            Self::Identity | Self::Other => len,
            Self::Gzip | Self::Deflate => cap.min(len.saturating_mul(MAX_RATIO).max(RATIO_FREE)),
        }
    }

    /// Undoes the encoding. Fails for what can't be undone wholly, ends early, has something behind its
    /// end, or unpacks to more than `cap` or by more than an honest ratio.
    pub(crate) fn decode(self, body: &[u8], cap: usize) -> Result<Cow<'_, [u8]>, TransportFailure> {
        let most = self.most(body.len(), cap);
        match self {
            Self::Identity => Ok(Cow::Borrowed(body)),
            Self::Other => Err(TransportFailure::BadEncoding),
            // Servers put the header on answers to HEAD and on empty ones too.
            Self::Gzip | Self::Deflate if body.is_empty() => Ok(Cow::Borrowed(body)),
            Self::Gzip => {
                let mut decoder = MultiGzDecoder::new(body);
                let out = read_capped(&mut decoder, most)?;
                whole(out, decoder.into_inner())
            }
            // `deflate` means zlib, but half of the world's servers have always sent it raw.
            Self::Deflate => {
                let mut zlib = ZlibDecoder::new(body);
                match read_capped(&mut zlib, most) {
                    Ok(out) => whole(out, zlib.into_inner()),
                    Err(TransportFailure::BadEncoding) if !looks_like_zlib(body) => {
                        let mut raw = DeflateDecoder::new(body);
                        let out = read_capped(&mut raw, most)?;
                        whole(out, raw.into_inner())
                    }
                    Err(e) => Err(e),
                }
            }
        }
    }
}

/// The charsets that a message declares.
fn charsets(headers: &[(String, String)]) -> impl Iterator<Item = String> {
    headers.iter().filter(|(n, _)| n == "content-type").filter_map(|(_, v)| {
        let lower = v.to_ascii_lowercase();
        let at = lower.find("charset")?;
        let value = lower[at + 7..].trim_start().strip_prefix('=')?.trim_start();
        let end = value.find([';', ',']).unwrap_or(value.len());
        Some(value[..end].trim().trim_matches(['"', '\'']).to_owned())
    })
}

/// Whether texts in a charset read as they do in ASCII, or are known by their bytes. In one that does not
/// (UTF-7, EBCDIC, UTF-32) a text means something else to its reader than to us.
fn readable(charset: &str) -> bool {
    const PREFIXES: [&str; 14] = [
        "utf-16", "utf16", "iso-8859", "iso8859", "iso_8859", "latin", "windows-", "cp125", "koi8", "euc-",
        "gb", "big5", "tis-620", "macroman",
    ];
    const NAMES: [&str; 10] = [
        "",
        "utf-8",
        "utf8",
        "us-ascii",
        "ascii",
        "shift_jis",
        "shift-jis",
        "sjis",
        "binary",
        "unicode-1-1-utf-8",
    ];
    NAMES.contains(&charset) || PREFIXES.iter().any(|p| charset.starts_with(p))
}

fn looks_like_zlib(body: &[u8]) -> bool {
    let [cmf, flg, ..] = body else { return false };
    cmf & 0x0f == 8 && (u16::from(*cmf) << 8 | u16::from(*flg)).is_multiple_of(31)
}

/// Bytes behind the end of the encoded data are forwarded but were not inspected: refused.
fn whole(out: Vec<u8>, rest: &[u8]) -> Result<Cow<'static, [u8]>, TransportFailure> {
    if rest.is_empty() { Ok(Cow::Owned(out)) } else { Err(TransportFailure::BadEncoding) }
}

fn read_capped(decoder: &mut impl Read, most: usize) -> Result<Vec<u8>, TransportFailure> {
    let mut out = Vec::new();
    // One byte more than allowed tells "exactly full" from "too much".
    let read = decoder.take(most as u64 + 1).read_to_end(&mut out);
    if out.len() > most || read.is_err() { Err(TransportFailure::BadEncoding) } else { Ok(out) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};

    use super::*;

    const CAP: usize = 1 << 20;

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut e = GzEncoder::new(Vec::new(), Compression::default());
        e.write_all(data).unwrap();
        e.finish().unwrap()
    }

    fn headers(value: &str) -> Vec<(String, String)> {
        vec![("content-encoding".to_owned(), value.to_owned())]
    }

    #[test]
    fn declared_encodings_are_read() {
        for (value, coding) in [
            ("", Coding::Identity),
            ("identity", Coding::Identity),
            ("GZip", Coding::Gzip),
            ("x-gzip", Coding::Gzip),
            ("identity, deflate", Coding::Deflate),
            ("gzip, gzip", Coding::Other),
            ("br", Coding::Other),
            ("zstd", Coding::Other),
        ] {
            assert_eq!(Coding::of(&headers(value)), coding, "{value}");
        }
        assert_eq!(Coding::of(&[]), Coding::Identity);
    }

    #[test]
    fn charsets_that_do_not_read_as_ascii_are_not_read() {
        for (value, read) in [
            ("text/plain", true),
            ("text/html; charset=\"UTF-8\"", true),
            ("text/html;charset=gb18030", true),
            ("application/json; charset=utf-16le", true),
            ("text/plain; charset=UTF-7", false),
            ("text/plain; Charset = 'cp037'", false),
            ("text/plain; charset=utf-32; x=y", false),
        ] {
            let headers = vec![("content-type".to_owned(), value.to_owned())];
            assert_eq!(Coding::of(&headers) == Coding::Identity, read, "{value}");
        }
    }

    #[test]
    fn gzip_and_both_kinds_of_deflate_are_undone() {
        let data = b"{\"a\": \"hello hello hello\"}";
        assert_eq!(&*Coding::Gzip.decode(&gzip(data), CAP).unwrap(), data);
        let two = [gzip(b"one "), gzip(b"two")].concat();
        assert_eq!(&*Coding::Gzip.decode(&two, CAP).unwrap(), b"one two");
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(data).unwrap();
        assert_eq!(&*Coding::Deflate.decode(&zlib.finish().unwrap(), CAP).unwrap(), data);
        let mut raw = DeflateEncoder::new(Vec::new(), Compression::default());
        raw.write_all(data).unwrap();
        assert_eq!(&*Coding::Deflate.decode(&raw.finish().unwrap(), CAP).unwrap(), data);
        assert_eq!(&*Coding::Gzip.decode(b"", CAP).unwrap(), b"");
    }

    #[test]
    fn what_is_broken_cut_short_or_followed_by_more_is_refused() {
        let good = gzip(b"hello");
        for bad in [
            good[..good.len() - 1].to_vec(),
            [good.clone(), b"tail".to_vec()].concat(),
            b"not gzip at all".to_vec(),
        ] {
            assert_eq!(Coding::Gzip.decode(&bad, CAP), Err(TransportFailure::BadEncoding));
        }
        assert_eq!(Coding::Other.decode(b"x", CAP), Err(TransportFailure::BadEncoding));
    }

    #[test]
    fn a_bomb_is_refused_by_size_and_by_ratio() {
        let zeros = gzip(&vec![0; 2 << 20]);
        assert_eq!(Coding::Gzip.decode(&zeros, 1 << 20), Err(TransportFailure::BadEncoding));
        assert_eq!(Coding::Gzip.decode(&zeros, 64 << 20), Err(TransportFailure::BadEncoding), "ratio");
        let small = gzip(&vec![0; RATIO_FREE]);
        assert_eq!(Coding::Gzip.decode(&small, CAP).unwrap().len(), RATIO_FREE);
    }

    #[test]
    fn bent_encodings_are_undone_within_bounds_or_refused() {
        let mut seeds = Vec::new();
        for text in sallyport_fuzz::corpus("response").iter().chain([&vec![0; 300_000]]) {
            let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
            zlib.write_all(text).unwrap();
            let mut raw = DeflateEncoder::new(Vec::new(), Compression::none());
            raw.write_all(text).unwrap();
            let gzip = gzip(text);
            seeds.extend([[&gzip[..], &gzip].concat(), gzip, zlib.finish().unwrap(), raw.finish().unwrap()]);
        }
        sallyport_fuzz::fuzz("coding", &seeds, &[gzip(b""), b"\x1f\x8b".to_vec()], |body| {
            for coding in [Coding::Gzip, Coding::Deflate] {
                for cap in [0, 1000, CAP] {
                    let start = std::time::Instant::now();
                    let out = coding.decode(body, cap);
                    if start.elapsed() > std::time::Duration::from_secs(2) {
                        return Err(format!("{coding:?} took {:?}", start.elapsed()));
                    }
                    match out {
                        Ok(out) if out.len() > coding.most(body.len(), cap) => {
                            return Err(format!("{} bytes come out of {}", out.len(), body.len()));
                        }
                        Ok(_) | Err(TransportFailure::BadEncoding) => {}
                        Err(e) => return Err(format!("{e:?}")),
                    }
                }
            }
            Ok(())
        });
    }
}
