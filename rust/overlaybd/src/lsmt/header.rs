//! The 4096-byte header and trailer of an LSMT file.

use crate::lsmt::MAX_VIRTUAL_SIZE;
use crate::Uuid;

/// Bytes reserved for a header or trailer.
pub const HEADER_SPACE: u64 = 4096;

const MAGIC: [u8; 24] = [
    b'L', b'S', b'M', b'T', 0x00, 0x01, 0x02, 0x00, // magic0
    0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C, 0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A, // magic1
];
/// Bytes of the header's fields, the rest being zero.
const STRUCT_SIZE: u32 = 390;
const VERSION: [u8; 2] = [1, 1];
const TAG_AT: usize = 134;
const TAG_SIZE: usize = 256;

const FLAG_HEADER: u32 = 1 << 0;
const FLAG_DATA: u32 = 1 << 1;
const FLAG_SEALED: u32 = 1 << 2;
const FLAG_SPARSE: u32 = 1 << 4;

/// Which of the four blocks of the format a header is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Header of a data file that may be sealed, and may be sparse.
    DataHeader {
        /// Written by a streamed layer; a layer sealed in place keeps its unsealed header.
        sealed: bool,
        /// Logical sectors lie at the same place in the file, shifted by the header.
        sparse: bool,
    },
    /// Trailer of a sealed data file.
    Trailer,
    /// Header of the index log beside an append-only upper.
    IndexHeader,
}

/// What a layer says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerInfo {
    /// Size of the image in bytes, as seen with this layer on top.
    pub virtual_size: u64,
    /// The layer's identifier.
    pub uuid: Uuid,
    /// The identifier of the layer beneath, or [`Uuid::NIL`].
    pub parent: Uuid,
    /// A text of the maker's, at most 256 bytes.
    pub user_tag: Vec<u8>,
}

/// A header or trailer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Which block this is.
    pub kind: Kind,
    /// Where the index starts, in bytes.
    pub index_offset: u64,
    /// Entries in the index, padding included.
    pub index_len: u64,
    /// The layer's own description.
    pub info: LayerInfo,
}

/// Why 4096 bytes are not the header or trailer that was expected.
#[derive(Debug, PartialEq, Eq, thiserror::Error, displaydoc::Display)]
pub enum HeaderError {
    /// not an LSMT file: the magic is missing
    Magic,
    /// unexpected flags {0:#x} in an LSMT {1}
    Flags(u32, &'static str),
    /// virtual size {0} is beyond what the format can address
    VirtualSize(u64),
    /// user tag of {0} bytes does not fit in 256
    UserTag(usize),
}

impl Header {
    /// Reads a block found at the start of a file.
    ///
    /// # Errors
    /// [`HeaderError`] if it is not a valid data or index header.
    pub fn parse_header(block: &[u8; HEADER_SPACE as usize]) -> Result<Self, HeaderError> {
        let flags = checked_flags(block)?;
        if flags & FLAG_HEADER == 0 {
            return Err(HeaderError::Flags(flags, "header"));
        }
        let kind = if flags & FLAG_DATA != 0 {
            Kind::DataHeader { sealed: flags & FLAG_SEALED != 0, sparse: flags & FLAG_SPARSE != 0 }
        } else if flags & FLAG_SEALED == 0 {
            Kind::IndexHeader
        } else {
            return Err(HeaderError::Flags(flags, "index header"));
        };
        Self::fields(block, kind)
    }

    /// Reads a block found at the end of a file.
    ///
    /// # Errors
    /// [`HeaderError`] if it is not the trailer of a sealed data file.
    pub fn parse_trailer(block: &[u8; HEADER_SPACE as usize]) -> Result<Self, HeaderError> {
        let flags = checked_flags(block)?;
        if flags & (FLAG_HEADER | FLAG_DATA | FLAG_SEALED) != FLAG_DATA | FLAG_SEALED {
            return Err(HeaderError::Flags(flags, "trailer"));
        }
        Self::fields(block, Kind::Trailer)
    }

    fn fields(block: &[u8; HEADER_SPACE as usize], kind: Kind) -> Result<Self, HeaderError> {
        let virtual_size = u64_at(block, 48);
        if virtual_size > MAX_VIRTUAL_SIZE {
            return Err(HeaderError::VirtualSize(virtual_size));
        }
        let tag = &block[TAG_AT..TAG_AT + TAG_SIZE];
        let used = tag.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Ok(Self {
            kind,
            index_offset: u64_at(block, 32),
            index_len: u64_at(block, 40),
            info: LayerInfo {
                virtual_size,
                uuid: Uuid::from_field(&block[56..93]),
                parent: Uuid::from_field(&block[93..130]),
                user_tag: tag[..used].to_vec(),
            },
        })
    }

    /// Writes the block.
    ///
    /// # Errors
    /// [`HeaderError`] if a field does not fit.
    pub fn to_block(&self) -> Result<[u8; HEADER_SPACE as usize], HeaderError> {
        if self.info.virtual_size > MAX_VIRTUAL_SIZE {
            return Err(HeaderError::VirtualSize(self.info.virtual_size));
        }
        let tag = &self.info.user_tag;
        if tag.len() > TAG_SIZE {
            return Err(HeaderError::UserTag(tag.len()));
        }
        let flags = match self.kind {
            Kind::DataHeader { sealed, sparse } => {
                let sealed = if sealed { FLAG_SEALED } else { 0 };
                let sparse = if sparse { FLAG_SPARSE } else { 0 };
                FLAG_HEADER | FLAG_DATA | sealed | sparse
            }
            Kind::Trailer => FLAG_DATA | FLAG_SEALED,
            Kind::IndexHeader => FLAG_HEADER,
        };
        let mut block = [0u8; HEADER_SPACE as usize];
        block[..24].copy_from_slice(&MAGIC);
        block[24..28].copy_from_slice(&STRUCT_SIZE.to_le_bytes());
        block[28..32].copy_from_slice(&flags.to_le_bytes());
        block[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_len.to_le_bytes());
        block[48..56].copy_from_slice(&self.info.virtual_size.to_le_bytes());
        block[56..93].copy_from_slice(&self.info.uuid.to_field());
        block[93..130].copy_from_slice(&self.info.parent.to_field());
        block[132..134].copy_from_slice(&VERSION);
        block[TAG_AT..TAG_AT + tag.len()].copy_from_slice(tag);
        Ok(block)
    }
}

fn checked_flags(block: &[u8; HEADER_SPACE as usize]) -> Result<u32, HeaderError> {
    if block[..24] != MAGIC {
        return Err(HeaderError::Magic);
    }
    Ok(u64_at(block, 24).wrapping_shr(32) as u32)
}

fn u64_at(block: &[u8; HEADER_SPACE as usize], at: usize) -> u64 {
    let mut bytes = [0u8; 8];
    bytes.copy_from_slice(&block[at..at + 8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: Kind) -> Header {
        let info = LayerInfo {
            virtual_size: 1 << 30,
            uuid: Uuid::from_bytes([0xAB; 16]),
            parent: Uuid::NIL,
            user_tag: b"made by a test".to_vec(),
        };
        Header { kind, index_offset: 4096, index_len: 3, info }
    }

    #[test]
    fn each_kind_survives() {
        let data = |sealed, sparse| Kind::DataHeader { sealed, sparse };
        for kind in [data(false, false), data(true, false), data(false, true), Kind::IndexHeader] {
            let header = header(kind);
            assert_eq!(Header::parse_header(&header.to_block().expect("fits")), Ok(header));
        }
        let trailer = header(Kind::Trailer);
        assert_eq!(Header::parse_trailer(&trailer.to_block().expect("fits")), Ok(trailer));
    }

    #[test]
    fn one_kind_is_not_taken_for_another() {
        let trailer = header(Kind::Trailer).to_block().expect("fits");
        assert!(matches!(Header::parse_header(&trailer), Err(HeaderError::Flags(..))));
        for kind in [Kind::DataHeader { sealed: true, sparse: false }, Kind::IndexHeader] {
            let block = header(kind).to_block().expect("fits");
            assert!(matches!(Header::parse_trailer(&block), Err(HeaderError::Flags(..))));
        }
    }

    #[test]
    fn absurd_fields_are_refused() {
        let mut huge = header(Kind::Trailer);
        huge.info.virtual_size = u64::MAX;
        assert_eq!(huge.to_block(), Err(HeaderError::VirtualSize(u64::MAX)));
        let mut block = header(Kind::Trailer).to_block().expect("fits");
        block[48..56].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(Header::parse_trailer(&block), Err(HeaderError::VirtualSize(u64::MAX)));
        block[0] = b'X';
        assert_eq!(Header::parse_trailer(&block), Err(HeaderError::Magic));
        let mut long = header(Kind::Trailer);
        long.info.user_tag = vec![b'a'; 257];
        assert_eq!(long.to_block(), Err(HeaderError::UserTag(257)));
    }
}
