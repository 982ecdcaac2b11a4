//! Writing a ZFile as a stream: no byte is written twice, so it can be hashed or uploaded on the way.

use std::io::{self, Write};

use crate::checksum::{crc32c, BLOCK_SEED};
use crate::zfile::codec::{Algorithm, Encoder};
use crate::zfile::header::{self, Header, HEADER_SPACE};
use crate::zfile::{MAX_BLOCK, MAX_BLOCKS, MIN_BLOCK};

/// How to compress.
#[derive(Debug, Clone, Copy)]
pub struct ZFileOptions {
    /// The codec.
    pub algorithm: Algorithm,
    /// Bytes of each block before compression: a power of two, 4096 to 65536. Random reads unpack whole blocks.
    pub block_size: u32,
    /// Store a checksum after each block.
    pub verify: bool,
}

impl Default for ZFileOptions {
    /// overlaybd's own defaults, with checksums.
    fn default() -> Self {
        Self { algorithm: Algorithm::Lz4, block_size: 4096, verify: true }
    }
}

/// Why a ZFile cannot be written with the options given.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum ZFileOptionsError {
    /// block size {0} is not a power of two from 4096 to 65536
    BlockSize(u32),
    /// starting the ZFile failed
    Io(#[from] io::Error),
}

/// Compresses what is written to it. [`ZFileWriter::finish`] must be called for the file to be complete.
pub struct ZFileWriter<W> {
    out: W,
    options: ZFileOptions,
    encoder: Encoder,
    /// Plain bytes of the block being filled.
    block: Vec<u8>,
    packed: Vec<u8>,
    /// Stored length of each block.
    lengths: Vec<u8>,
    original_size: u64,
    offset: u64,
}

impl<W: Write> ZFileWriter<W> {
    /// Writes the header to `out` and takes data from here on.
    ///
    /// # Errors
    /// [`ZFileOptionsError`].
    pub fn new(mut out: W, options: ZFileOptions) -> Result<Self, ZFileOptionsError> {
        if !options.block_size.is_power_of_two() || !(MIN_BLOCK..=MAX_BLOCK).contains(&options.block_size) {
            return Err(ZFileOptionsError::BlockSize(options.block_size));
        }
        let encoder = Encoder::new(options.algorithm)?;
        let header = describe(options, header::FLAG_HEADER | header::FLAG_DATA | header::FLAG_DIGEST);
        out.write_all(&header.to_block())?;
        let block_size = options.block_size as usize;
        Ok(Self {
            out,
            options,
            encoder,
            block: Vec::with_capacity(block_size),
            packed: vec![0; options.algorithm.bound(block_size) + 4],
            lengths: Vec::new(),
            original_size: 0,
            offset: HEADER_SPACE as u64,
        })
    }

    /// Compresses what is left, writes the jump table and the trailer, and gives back the writer.
    ///
    /// # Errors
    /// Compressing or writing failed; the file is then incomplete and will not open.
    pub fn finish(mut self) -> io::Result<W> {
        if !self.block.is_empty() {
            self.pack()?;
        }
        self.out.write_all(&self.lengths)?;
        let flags = header::FLAG_DATA | header::FLAG_SEALED | header::FLAG_DIGEST;
        let trailer = Header {
            index_offset: self.offset,
            index_size: self.lengths.len() as u64 / 4,
            original_size: self.original_size,
            index_crc: crc32c(0, &self.lengths),
            ..describe(self.options, flags)
        };
        self.out.write_all(&trailer.to_block())?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn pack(&mut self) -> io::Result<()> {
        if self.lengths.len() as u64 / 4 == MAX_BLOCKS {
            return Err(io::Error::other("a ZFile holds at most 1000000000 blocks"));
        }
        let mut len = self.encoder.compress(&self.block, &mut self.packed)?;
        if self.options.verify {
            let checksum = crc32c(BLOCK_SEED, &self.packed[..len]);
            self.packed[len..len + 4].copy_from_slice(&checksum.to_le_bytes());
            len += 4;
        }
        self.out.write_all(&self.packed[..len])?;
        self.lengths.extend_from_slice(&(len as u32).to_le_bytes());
        self.offset += len as u64;
        self.original_size += self.block.len() as u64;
        self.block.clear();
        Ok(())
    }
}

impl<W: Write> Write for ZFileWriter<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let room = self.options.block_size as usize - self.block.len();
        let taken = room.min(buf.len());
        self.block.extend_from_slice(&buf[..taken]);
        if self.block.len() == self.options.block_size as usize {
            self.pack()?;
        }
        Ok(taken)
    }

    /// Flushes what is already compressed; a partial block waits for more.
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn describe(options: ZFileOptions, flags: u64) -> Header {
    Header {
        flags,
        index_offset: 0,
        index_size: 0,
        original_size: 0,
        index_crc: 0,
        block_size: options.block_size,
        algorithm: options.algorithm as u8,
        use_dict: false,
        dict_size: 0,
        verify: options.verify,
    }
}
