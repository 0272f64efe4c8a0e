//! A small mutation fuzzer for tests on stable Rust, and the inputs it starts from.
//!
//! Why one of our own: `proptest` and `bolero`'s stable engine build inputs from nothing, and a random text
//! is never a valid event stream around valid JSON around a token whose checksum holds. What finds faults
//! in this code is a valid message bent a little. `bolero`, `cargo-fuzz` and AFL bend inputs too, but only
//! under a nightly compiler or with a toolchain of their own, so `cargo test` would not run them. `proptest`
//! stays where inputs can be described; this crate is for bytes.
//!
//! A target is an ordinary test that calls [`fuzz`]. The crate knows nothing of what is tested, so that
//! targets stand beside the code they test, private parts included.
//!
//! | variable | meaning |
//! |---|---|
//! | `SALLYPORT_FUZZ_SECONDS` | how long each target runs; without it, a fixed number of cases |
//! | `SALLYPORT_FUZZ_SEED` | where the cases start; a fixed number by default, so that `cargo test` does not fail today for what passed yesterday |
//! | `SALLYPORT_FUZZ_CASE` | run this one case only, as a failure prints it |
//!
//! A case is a function of its number, the corpus and the words: the same number gives the same input on
//! every machine. What is not guaranteed: coverage. There is no feedback from the code; the corpus has to
//! reach every parser by itself.

mod mutate;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use mutate::{Rng, mutate};

/// Cases of each target where no time is given: some seconds without optimisation.
const CASES: u64 = 600;
/// How long a failing input is made smaller before it is reported.
const MINIMISE: Duration = Duration::from_secs(5);
/// Breaks up tokens in the corpus so that secret scanners leave this repository alone; as in packs.
const SPLITTER: &str = "{+}";

/// Inputs whose file's name starts with `prefix`, in the order of their names.
///
/// # Panics
/// When the corpus can't be read, or has no such file.
pub fn corpus(prefix: &str) -> Vec<Vec<u8>> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix)))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "no file of {dir} starts with `{prefix}`");
    paths.iter().map(|p| unsplit(&std::fs::read(p).unwrap_or_default())).collect()
}

/// The bytes without the marks that break up tokens.
pub fn unsplit(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = rest.windows(SPLITTER.len()).position(|w| w == SPLITTER.as_bytes()) {
        out.extend_from_slice(&rest[..at]);
        rest = &rest[at + SPLITTER.len()..];
    }
    out.extend_from_slice(rest);
    out
}

/// Runs `check` on every seed and then on bent ones: a fixed number of cases, or for `SALLYPORT_FUZZ_SECONDS`. `check` returns what is wrong;
/// a panic in it is a failure too.
///
/// # Panics
/// On the first failure, with the number of the case and the file that holds its smallest input.
pub fn fuzz(name: &str, seeds: &[Vec<u8>], words: &[Vec<u8>], check: impl Fn(&[u8]) -> Result<(), String>) {
    if let Some(case) = variable("SALLYPORT_FUZZ_CASE") {
        return one(name, case, &mutate(&mut Rng::new(case), seeds, words), &check);
    }
    for (i, seed) in seeds.iter().enumerate() {
        one(name, i as u64, seed, &check);
    }
    let first = variable("SALLYPORT_FUZZ_SEED").unwrap_or(0);
    // Without a time, a fixed number of cases: then a test that passed passes again.
    let time = variable("SALLYPORT_FUZZ_SECONDS").map(Duration::from_secs);
    let start = Instant::now();
    let mut cases = 0u64;
    while time.map_or(cases < CASES, |t| start.elapsed() < t) {
        // Cases of neighbouring seeds must not be each other's.
        let case = Rng::new(first.wrapping_add(cases << 32)).next();
        one(name, case, &mutate(&mut Rng::new(case), seeds, words), &check);
        cases += 1;
    }
    println!("{name}: {cases} cases in {:.1?}", start.elapsed());
}

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    let number = match value.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => value.parse(),
    };
    #[allow(clippy::panic, reason = "a variable that is ignored would be a test that passes for nothing")]
    Some(number.unwrap_or_else(|e| panic!("{name}={value}: {e}")))
}

#[allow(clippy::panic, reason = "this is how a test fails")]
fn one(name: &str, case: u64, input: &[u8], check: &impl Fn(&[u8]) -> Result<(), String>) {
    let Some(why) = failure(check, input) else { return };
    let (small, why) = smaller(input, why, check);
    let path = folder().map(|dir| dir.join(format!("{name}-{case:#x}")));
    let kept = path.filter(|p| std::fs::write(p, &small).is_ok());
    let shown: String = String::from_utf8_lossy(&small[..small.len().min(2000)]).escape_debug().collect();
    panic!(
        "{name}: {why}\n  replay: SALLYPORT_FUZZ_CASE={case:#x}\n  input ({} bytes, in {}): {shown}",
        small.len(),
        kept.map_or_else(|| "no file".to_owned(), |p| p.display().to_string()),
    );
}

/// What is wrong with `input`, if something is.
fn failure(check: &impl Fn(&[u8]) -> Result<(), String>, input: &[u8]) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(|| check(input))) {
        Ok(result) => result.err(),
        Err(cause) => {
            let text = cause.downcast_ref::<&str>().map(|s| (*s).to_owned());
            let text = text.or_else(|| cause.downcast_ref::<String>().cloned()).unwrap_or_default();
            Some(format!("panicked: {text}"))
        }
    }
}

/// The smallest failing input that leaving parts out leads to within [`MINIMISE`].
fn smaller(input: &[u8], why: String, check: &impl Fn(&[u8]) -> Result<(), String>) -> (Vec<u8>, String) {
    let start = Instant::now();
    let (mut best, mut why) = (input.to_vec(), why);
    let mut part = best.len().div_ceil(2);
    while part > 0 {
        let mut at = 0;
        while at < best.len() && start.elapsed() < MINIMISE {
            let mut less = best.clone();
            less.drain(at..(at + part).min(best.len()));
            match failure(check, &less) {
                Some(w) => (best, why) = (less, w),
                None => at += part,
            }
        }
        part = if part == 1 { 0 } else { part.div_ceil(2) };
    }
    (best, why)
}

/// `target/fuzz-failures`, wherever the running test's own target directory is.
fn folder() -> Option<PathBuf> {
    // target/<profile>/deps/<test>; a test that was moved elsewhere leaves no file.
    let exe = std::env::current_exe().ok()?;
    let dir =
        exe.ancestors().nth(1).filter(|d| d.ends_with("deps"))?.ancestors().nth(2)?.join("fuzz-failures");
    std::fs::create_dir_all(&dir).ok()?;
    Some(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_found_made_small_and_names_its_case() {
        let seeds = [b"hello world, this is a seed".to_vec()];
        let caught = catch_unwind(|| {
            fuzz("test-target", &seeds, &[b"needle".to_vec()], |input| {
                let bad = input.windows(6).any(|w| w == b"needle");
                if bad { Err("found".into()) } else { Ok(()) }
            });
        });
        let cause = caught.unwrap_err();
        let text = cause.downcast_ref::<String>().unwrap();
        assert!(text.contains("SALLYPORT_FUZZ_CASE=0x") && text.contains("(6 bytes"), "{text}");
    }

    #[test]
    fn a_panic_is_a_failure() {
        assert_eq!(failure(&|_| panic!("oh"), b""), Some("panicked: oh".into()));
    }

    #[test]
    fn the_corpus_has_no_marks_left() {
        assert_eq!(unsplit(b"a{+}b{+}{+}c"), b"abc");
        assert!(corpus("").iter().all(|i| !i.windows(3).any(|w| w == b"{+}")));
    }
}
