//! The codec of discovery: prost's, with buffers for streams that rest.

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// Bytes that a stream's buffers begin with, one for each direction, and grow by. A stream of discovery says
/// a hundred bytes at its beginning and then nothing for minutes; with tonic's 8 KiB, 5,000 of them held 80
/// MiB. The operator does not encode by it ([`framed`](crate::discovery::framed)): the encoder keeps the buffer of
/// the largest message for as long as the stream lives.
const BUFFER: usize = 512;
/// As tonic's own.
const YIELD_AT: usize = 32 << 10;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resting<T, U>(std::marker::PhantomData<(T, U)>);

impl<T, U> Default for Resting<T, U> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<T, U> Codec for Resting<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER, YIELD_AT))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER, YIELD_AT))
    }
}
