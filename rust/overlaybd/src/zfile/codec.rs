//! The two block codecs.

use std::cell::RefCell;
use std::io;

use zstd::bulk::{Compressor, Decompressor};

/// Level overlaybd compresses with (`Compressor_zstd::cLevel`).
const ZSTD_LEVEL: i32 = 3;

/// A compression algorithm, by its number on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Raw LZ4 blocks.
    Lz4 = 1,
    /// Zstandard frames.
    Zstd = 2,
}

thread_local! {
    // A zstd context is over 100 KiB and dear to make, so each thread keeps one.
    static ZSTD: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

impl Algorithm {
    /// The algorithm of that number, if it is one that can be read here.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Most bytes that `len` bytes can become.
    pub fn bound(self, len: usize) -> usize {
        match self {
            Self::Lz4 => lz4_flex::block::get_maximum_output_size(len),
            Self::Zstd => zstd::zstd_safe::compress_bound(len),
        }
    }

    /// Decompresses `from` and requires that it gives exactly the length of `to`.
    pub fn decompress(self, from: &[u8], to: &mut [u8]) -> io::Result<()> {
        let expected = to.len();
        let len = match self {
            Self::Lz4 => lz4_flex::block::decompress_into(from, to).map_err(invalid)?,
            Self::Zstd => ZSTD.with_borrow_mut(|context| {
                let context = match context {
                    Some(context) => context,
                    None => context.insert(Decompressor::new()?),
                };
                context.decompress_to_buffer(from, to).map_err(invalid)
            })?,
        };
        if len != expected {
            return Err(invalid(format!("compressed block holds {len} bytes where {expected} were expected")));
        }
        Ok(())
    }
}

/// Compresses blocks of one file.
pub enum Encoder {
    /// LZ4 needs no context.
    Lz4,
    /// Zstandard's context.
    Zstd(Compressor<'static>),
}

impl Encoder {
    /// Makes the codec's context.
    pub fn new(algorithm: Algorithm) -> io::Result<Self> {
        match algorithm {
            Algorithm::Lz4 => Ok(Self::Lz4),
            Algorithm::Zstd => Ok(Self::Zstd(Compressor::new(ZSTD_LEVEL)?)),
        }
    }

    /// Compresses `from` into `to`, which has at least [`Algorithm::bound`] bytes, and gives the length.
    pub fn compress(&mut self, from: &[u8], to: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Lz4 => lz4_flex::block::compress_into(from, to).map_err(io::Error::other),
            Self::Zstd(context) => context.compress_to_buffer(from, to),
        }
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
