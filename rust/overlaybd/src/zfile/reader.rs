//! Random access to a ZFile.

use std::io;
use std::sync::Arc;

use crate::checksum::{crc32c, BLOCK_SEED};
use crate::zfile::codec::Algorithm;
use crate::zfile::header::{self, ChecksumMismatch, Header, HEADER_SPACE};
use crate::zfile::jump::JumpTable;
use crate::zfile::{MAX_BLOCK, MAX_BLOCKS};
use crate::ByteSource;

/// Most compressed bytes fetched from the source at once.
const FETCH: u64 = 256 * 1024;

/// Why a source cannot be opened as a ZFile.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum OpenZFileError {
    /// not a ZFile: the magic is missing
    Magic,
    /// the ZFile is incomplete: it has no sealed trailer
    Unsealed,
    /// checksum mismatch in the ZFile's {0}
    Checksum(&'static str),
    /// ZFile compression algorithm {0} is not supported
    Algorithm(u8),
    /// ZFiles with a dictionary are not supported
    Dictionary,
    /// ZFile block size {0} is not a power of two up to 65536
    BlockSize(u32),
    /// the ZFile's jump table does not fit its data: {0}
    JumpTable(&'static str),
    /// reading the ZFile failed
    Io(#[from] io::Error),
}

/// A compressed source, read as if it were not.
pub struct ZFile {
    inner: Arc<dyn ByteSource>,
    algorithm: Algorithm,
    verify: bool,
    block_size: u64,
    size: u64,
    jump: JumpTable,
}

/// Whether the source starts like a ZFile.
///
/// # Errors
/// The source failed.
pub fn is_zfile(source: &dyn ByteSource) -> io::Result<bool> {
    Ok(source.size() >= HEADER_SPACE as u64 && Header::parse(&read_block(source, 0)?).is_some())
}

impl ZFile {
    /// Opens a compressed source: reads the trailer (or the rewritten header) and the jump table.
    ///
    /// # Errors
    /// [`OpenZFileError`]; nothing is allocated beyond a few times the size of the source.
    pub fn open(inner: Arc<dyn ByteSource>) -> Result<Self, OpenZFileError> {
        let space = HEADER_SPACE as u64;
        if inner.size() < 2 * space {
            return Err(OpenZFileError::Magic);
        }
        let index_end = inner.size() - space;
        let mut header = parse(&*inner, 0, "header")?;
        if !header.has(header::FLAG_HEADER | header::FLAG_DATA) {
            return Err(OpenZFileError::Magic);
        }
        if !header.has(header::FLAG_HEADER_OVERWRITTEN) {
            header = parse(&*inner, index_end, "trailer")?;
            if header.has(header::FLAG_HEADER) || !header.has(header::FLAG_DATA | header::FLAG_SEALED) {
                return Err(OpenZFileError::Unsealed);
            }
        }
        let algorithm = Algorithm::from_number(header.algorithm).ok_or(OpenZFileError::Algorithm(header.algorithm))?;
        if header.use_dict || header.dict_size != 0 {
            return Err(OpenZFileError::Dictionary);
        }
        if !header.block_size.is_power_of_two() || header.block_size > MAX_BLOCK {
            return Err(OpenZFileError::BlockSize(header.block_size));
        }
        let lengths = read_jump_table(&*inner, &header, algorithm, index_end)?;
        let trailing = if header.verify { 4 } else { 0 };
        let max = algorithm.bound(header.block_size as usize) as u32 + trailing;
        let jump = JumpTable::build(&lengths, space, trailing + 1, max)
            .ok_or(OpenZFileError::JumpTable("a block length is impossible"))?;
        if jump.offset(jump.len()) != header.index_offset {
            return Err(OpenZFileError::JumpTable("the blocks do not end where it starts"));
        }
        let block_size = header.block_size.into();
        Ok(Self { inner, algorithm, verify: header.verify, block_size, size: header.original_size, jump })
    }

    /// The algorithm of its blocks.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Decompresses block `i` from its stored bytes into the parts of `buf` (which starts at `offset`) it covers.
    fn unpack(&self, i: usize, stored: &[u8], buf: &mut [u8], offset: u64, scratch: &mut Vec<u8>) -> io::Result<()> {
        let compressed = if self.verify {
            let (compressed, checksum) = stored.split_at(stored.len() - 4);
            if crc32c(BLOCK_SEED, compressed).to_le_bytes() != *checksum {
                let message = format!("checksum mismatch in compressed block {i}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            compressed
        } else {
            stored
        };
        let start = i as u64 * self.block_size;
        let len = self.block_size.min(self.size - start) as usize;
        let from = offset.max(start);
        let to = (offset + buf.len() as u64).min(start + len as u64);
        let part = &mut buf[(from - offset) as usize..(to - offset) as usize];
        if part.len() == len {
            return self.algorithm.decompress(compressed, part);
        }
        scratch.resize(len, 0);
        self.algorithm.decompress(compressed, scratch)?;
        part.copy_from_slice(&scratch[(from - start) as usize..(to - start) as usize]);
        Ok(())
    }
}

impl ByteSource for ZFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        if buf.is_empty() {
            return Ok(());
        }
        let last = end.div_ceil(self.block_size) as usize;
        let mut next = (offset / self.block_size) as usize;
        let (mut stored, mut scratch) = (Vec::new(), Vec::new());
        while next < last {
            let base = self.jump.offset(next);
            let mut stop = next + 1;
            while stop < last && self.jump.offset(stop + 1) - base <= FETCH {
                stop += 1;
            }
            stored.resize((self.jump.offset(stop) - base) as usize, 0);
            self.inner.read_exact_at(&mut stored, base)?;
            for i in next..stop {
                let range = (self.jump.offset(i) - base) as usize..(self.jump.offset(i + 1) - base) as usize;
                self.unpack(i, &stored[range], buf, offset, &mut scratch)?;
            }
            next = stop;
        }
        Ok(())
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return Ok(());
        }
        let first = self.jump.offset((offset / self.block_size) as usize);
        let last = self.jump.offset(end.div_ceil(self.block_size) as usize);
        self.inner.prefetch(first, last - first)
    }
}

/// The block lengths, four bytes each, after every check that can be made before they are believed.
fn read_jump_table(
    source: &dyn ByteSource,
    header: &Header,
    algorithm: Algorithm,
    index_end: u64,
) -> Result<Vec<u8>, OpenZFileError> {
    let blocks = header.original_size.div_ceil(header.block_size.into());
    let compressed = header.has(header::FLAG_INDEX_COMPRESSED);
    let data = header.index_offset.checked_sub(HEADER_SPACE as u64);
    let data = data.ok_or(OpenZFileError::JumpTable("it starts inside the header"))?;
    // A block takes at least one byte, so a small file cannot claim many.
    if blocks > MAX_BLOCKS || blocks > data {
        return Err(OpenZFileError::JumpTable("there are more blocks than bytes"));
    }
    let stored_len = match compressed {
        true => header.index_size,
        false if header.index_size == blocks => blocks * 4,
        false => return Err(OpenZFileError::JumpTable("it has the wrong number of entries")),
    };
    if index_end.checked_sub(header.index_offset).is_none_or(|room| stored_len > room) {
        return Err(OpenZFileError::JumpTable("it reaches outside the file"));
    }
    let mut stored = vec![0u8; stored_len as usize];
    source.read_exact_at(&mut stored, header.index_offset)?;
    if header.has(header::FLAG_DIGEST) && crc32c(0, &stored) != header.index_crc {
        return Err(OpenZFileError::Checksum("jump table"));
    }
    if !compressed {
        return Ok(stored);
    }
    let mut lengths = vec![0u8; blocks as usize * 4];
    algorithm
        .decompress(&stored, &mut lengths)
        .map_err(|_| OpenZFileError::JumpTable("it does not decompress to its size"))?;
    Ok(lengths)
}

fn parse(source: &dyn ByteSource, offset: u64, what: &'static str) -> Result<Header, OpenZFileError> {
    match Header::parse(&read_block(source, offset)?) {
        Some(Ok(header)) => Ok(header),
        Some(Err(ChecksumMismatch)) => Err(OpenZFileError::Checksum(what)),
        None => Err(OpenZFileError::Magic),
    }
}

fn read_block(source: &dyn ByteSource, offset: u64) -> io::Result<[u8; HEADER_SPACE]> {
    let mut block = [0u8; HEADER_SPACE];
    source.read_exact_at(&mut block, offset)?;
    Ok(block)
}
