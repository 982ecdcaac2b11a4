//! The LSMT file format: headers and index entries. See `docs/formats/overlaybd.md`.

mod extent;
mod header;
mod index;

pub use extent::Extent;
pub use header::{Header, HeaderError, Kind, LayerInfo, HEADER_SPACE};
pub use index::{is_valid, padding, read_index, IndexError, MAX_EXTENTS};

/// The unit of every position in an index, in bytes.
pub const SECTOR: u64 = 512;

/// The largest virtual size an index can describe, in bytes: the last offset marks padding.
pub const MAX_VIRTUAL_SIZE: u64 = Extent::MAX_OFFSET * SECTOR;

/// Sectors taken by a header, hence the first that can hold data.
pub const HEADER_SECTORS: u64 = HEADER_SPACE / SECTOR;
