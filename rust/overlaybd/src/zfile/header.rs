//! The 512-byte header and trailer of a ZFile.

use crate::checksum::crc32c;

/// Bytes reserved for a header or trailer.
pub const HEADER_SPACE: usize = 512;

const MAGIC: [u8; 24] = *b"ZFile\0\x01\0tuji.yyf@Alibaba";
/// Bytes of the header's fields, the rest being zero.
const STRUCT_SIZE: u32 = 96;

/// This block is the header, not the trailer.
pub const FLAG_HEADER: u64 = 1 << 0;
/// The file holds data; always set.
pub const FLAG_DATA: u64 = 1 << 1;
/// The file is complete; set in the trailer.
pub const FLAG_SEALED: u64 = 1 << 2;
/// The header was written again at the end and is as good as the trailer.
pub const FLAG_HEADER_OVERWRITTEN: u64 = 1 << 3;
/// `digest` and `index_crc` are filled in.
pub const FLAG_DIGEST: u64 = 1 << 4;
/// The jump table is compressed and `index_size` counts its bytes.
pub const FLAG_INDEX_COMPRESSED: u64 = 1 << 5;

/// The fields of a header or trailer, as they are on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The `FLAG_` bits.
    pub flags: u64,
    /// Where the jump table starts, in bytes.
    pub index_offset: u64,
    /// Entries in the jump table, or its stored bytes if it is compressed.
    pub index_size: u64,
    /// Bytes before compression.
    pub original_size: u64,
    /// Bare CRC-32C of the jump table as stored.
    pub index_crc: u32,
    /// Bytes of each block before compression.
    pub block_size: u32,
    /// Number of the compression algorithm.
    pub algorithm: u8,
    /// Whether a dictionary is used.
    pub use_dict: bool,
    /// Bytes of the dictionary that follows the header.
    pub dict_size: u32,
    /// Whether a checksum follows each block.
    pub verify: bool,
}

impl Header {
    /// Whether all the given bits are set.
    pub fn has(&self, flags: u64) -> bool {
        self.flags & flags == flags
    }

    /// Reads a block: nothing if the magic is missing, an error if its own checksum is wrong.
    pub fn parse(block: &[u8; HEADER_SPACE]) -> Option<Result<Self, ChecksumMismatch>> {
        if block[..24] != MAGIC {
            return None;
        }
        let header = Self {
            flags: u64::from_le_bytes(field(block, 32)),
            index_offset: u64::from_le_bytes(field(block, 40)),
            index_size: u64::from_le_bytes(field(block, 48)),
            original_size: u64::from_le_bytes(field(block, 56)),
            index_crc: u32::from_le_bytes(field(block, 64)),
            block_size: u32::from_le_bytes(field(block, 72)),
            algorithm: block[76],
            use_dict: block[78] != 0,
            dict_size: u32::from_le_bytes(field(block, 84)),
            verify: block[88] != 0,
        };
        if header.has(FLAG_DIGEST) && u32::from_le_bytes(field(block, 28)) != digest(block) {
            return Some(Err(ChecksumMismatch));
        }
        Some(Ok(header))
    }

    /// Writes the block, with its checksum.
    pub fn to_block(self) -> [u8; HEADER_SPACE] {
        let mut block = [0u8; HEADER_SPACE];
        block[..24].copy_from_slice(&MAGIC);
        block[24..28].copy_from_slice(&STRUCT_SIZE.to_le_bytes());
        block[32..40].copy_from_slice(&self.flags.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_offset.to_le_bytes());
        block[48..56].copy_from_slice(&self.index_size.to_le_bytes());
        block[56..64].copy_from_slice(&self.original_size.to_le_bytes());
        block[64..68].copy_from_slice(&self.index_crc.to_le_bytes());
        block[72..76].copy_from_slice(&self.block_size.to_le_bytes());
        block[76] = self.algorithm;
        block[78] = self.use_dict.into();
        block[84..88].copy_from_slice(&self.dict_size.to_le_bytes());
        block[88] = self.verify.into();
        if self.has(FLAG_DIGEST) {
            let digest = digest(&block);
            block[28..32].copy_from_slice(&digest.to_le_bytes());
        }
        block
    }
}

/// The header's own checksum is wrong.
#[derive(Debug)]
pub struct ChecksumMismatch;

/// Checksum of the whole block with the digest field taken as zero.
fn digest(block: &[u8; HEADER_SPACE]) -> u32 {
    let mut cleared = *block;
    cleared[28..32].fill(0);
    crc32c(0, &cleared)
}

fn field<const N: usize>(block: &[u8; HEADER_SPACE], at: usize) -> [u8; N] {
    let mut bytes = [0u8; N];
    bytes.copy_from_slice(&block[at..at + N]);
    bytes
}
