//! Layered block images in containerd/overlaybd's on-disk formats.
//!
//! An image is a stack of immutable layers, each an LSMT file (data plus a sorted index of
//! logical extents), optionally compressed as a ZFile, with at most one writable upper on top.
//! The byte layout and its public sources are in `docs/formats/overlaybd.md`.
//!
//! * [`Layer`] is one sealed layer over any [`ByteSource`]; [`Stack`] is up to 255 of them seen as one.
//! * [`Upper`] is the writable top, append-only with an index log, or sparse.
//! * [`Image`] joins both: positional reads, writes, discards, flushes and the live snapshot
//!   ([`Image::seal_and_continue`]).
//! * [`LayerWriter`] streams a new layer, [`compact`] folds layers into one, and [`zfile`] compresses.
//!
//! Everything is synchronous and takes `&self`: any number of threads may read and write at once, and
//! no lock is held while bytes move.
//!
//! Layers are hostile input. Opening one validates every offset, length and count before it is used
//! and never allocates more than a small multiple of the bytes that are really there.

#![forbid(unsafe_code)]

mod checksum;
mod compact;
mod digest;
mod image;
mod index;
mod layer;
mod lsmt;
mod source;
mod stack;
mod sync;
mod tar;
mod upper;
mod uuid;
mod writer;
pub mod zfile;

pub use compact::{compact, CompactError, CompactOptions};
pub use digest::{sha256, Digest, DigestWriter};
pub use image::{Image, ReadError, WriteError};
pub use index::{Place, Segment};
pub use layer::{Layer, OpenLayerError};
pub use lsmt::{Header, HeaderError, Kind, LayerInfo, HEADER_SPACE, MAX_VIRTUAL_SIZE, SECTOR};
pub use source::{ByteSource, FileSource, MemorySource, Window};
pub use stack::{ParentCheck, Stack, StackError, MAX_LAYERS};
pub use tar::{unwrap_tar, TarError};
pub use upper::{CreateUpperError, FlushError, OpenUpperError, SealError, Upper, UpperStats};
pub use uuid::{Uuid, UuidError};
pub use writer::{LayerSummary, LayerWriter, WriteLayerError};
