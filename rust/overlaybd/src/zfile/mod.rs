//! ZFile: overlaybd's seekable compression. See `docs/formats/overlaybd.md`.

mod codec;
mod header;
mod jump;
mod reader;
mod writer;

pub use codec::Algorithm;
pub use header::HEADER_SPACE;
pub use reader::{is_zfile, OpenZFileError, ZFile};
pub use writer::{ZFileOptions, ZFileOptionsError, ZFileWriter};

/// The smallest block size written here: with less, a group of incompressible blocks would overflow the 16-bit
/// offsets of overlaybd's own reader.
pub const MIN_BLOCK: u32 = 4096;
/// The largest block size of the format (`MAX_READ_SIZE` in `zfile.h`).
pub const MAX_BLOCK: u32 = 65536;
/// The most blocks a file may have (`MAX_ZFILE_INDEX_SIZE` in `zfile.cpp`).
pub const MAX_BLOCKS: u64 = 1_000_000_000;
