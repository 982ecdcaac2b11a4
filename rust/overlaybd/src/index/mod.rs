//! In-memory indexes: sorted tables, the mutable map of an upper, and merging.

mod map;
mod merge;
mod resolve;

pub use map::ExtentMap;
pub use merge::{merge_all, overlay, replay, replay_into};
pub use resolve::{overlapping, resolve, Place, Segment};

use std::sync::Arc;

use crate::lsmt::Extent;

/// A sorted, disjoint, immutable index: 16 bytes per extent, searched by bisection. The vector is the one it was made in: moving
/// it into the allocation of the count would touch as much fresh memory again.
pub type Table = Arc<Vec<Extent>>;
