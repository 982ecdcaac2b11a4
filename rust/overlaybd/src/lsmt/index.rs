//! The index of a sealed layer: reading with validation, and the padding that writing needs.

use std::io;

use crate::lsmt::{Extent, HEADER_SECTORS, SECTOR};
use crate::ByteSource;

/// The most entries an index may have (1 GiB of them): far above any real layer, it bounds memory.
pub const MAX_EXTENTS: u64 = 1 << 26;

/// Bytes read at a time, so that memory grows only as valid entries arrive. Much for a local file, but a remote one is
/// a round trip away.
const STEP: usize = 1 << 20;

/// Why an index cannot be used.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum IndexError {
    /// index of {entries} entries at byte {offset} does not fit in {limit} bytes
    OutOfBounds {
        /// Where the index is said to start.
        offset: u64,
        /// How many entries it is said to have.
        entries: u64,
        /// Where the trailer starts.
        limit: u64,
    },
    /// index of {0} entries is larger than this reader takes
    TooLarge(u64),
    /// index entry {0} overlaps the one before it or is out of order
    Order(u64),
    /// index entry {0} is empty or reaches outside the layer
    Range(u64),
    /// reading the index failed
    Io(#[from] io::Error),
}

/// Reads and validates the index at `offset`, whose data lies before it and which ends before `limit`.
///
/// Entries must be sorted and disjoint and must lie in the data section. Padding is left out, tags are
/// cleared and contiguous entries are joined.
pub fn read_index(source: &dyn ByteSource, offset: u64, entries: u64, limit: u64) -> Result<Vec<Extent>, IndexError> {
    let bytes = entries.checked_mul(Extent::SIZE as u64);
    let end = bytes.and_then(|bytes| offset.checked_add(bytes));
    let (Some(bytes), Some(true)) = (bytes, end.map(|end| end <= limit)) else {
        return Err(IndexError::OutOfBounds { offset, entries, limit });
    };
    if entries > MAX_EXTENTS {
        return Err(IndexError::TooLarge(entries));
    }
    let data_end = offset / SECTOR;
    let mut extents: Vec<Extent> = Vec::new();
    let mut previous_end = 0;
    let mut buf = vec![0u8; STEP.min(bytes as usize)];
    let mut at = 0;
    while at < bytes {
        let step = (bytes - at).min(STEP as u64) as usize;
        source.read_exact_at(&mut buf[..step], offset + at)?;
        extents.reserve_exact(((bytes - at) as usize / Extent::SIZE).min(extents.len().max(step / Extent::SIZE)));
        for (i, entry) in buf[..step].chunks_exact(Extent::SIZE).enumerate() {
            let number = at / Extent::SIZE as u64 + i as u64;
            let mut raw = [0u8; Extent::SIZE];
            raw.copy_from_slice(entry);
            let extent = Extent::from_bytes(raw).with_tag(0);
            if extent.offset() == Extent::MAX_OFFSET {
                continue;
            }
            if !is_valid(extent, data_end) {
                return Err(IndexError::Range(number));
            }
            if extent.offset() < previous_end {
                return Err(IndexError::Order(number));
            }
            previous_end = extent.end();
            match extents.last_mut().and_then(|last| last.join(extent).map(|joined| (last, joined))) {
                Some((last, joined)) => *last = joined,
                None => extents.push(extent),
            }
        }
        at += step as u64;
    }
    extents.shrink_to_fit();
    Ok(extents)
}

/// Whether an entry is non-empty and stays inside the address space and inside `HEADER_SECTORS..data_end`.
pub fn is_valid(extent: Extent, data_end: u64) -> bool {
    let in_data = extent.is_zero() || (extent.place() >= HEADER_SECTORS && extent.place() + extent.len() <= data_end);
    extent.len() > 0 && extent.end() <= Extent::MAX_OFFSET && in_data
}

/// How many padding entries bring `entries` to a multiple of `block` bytes.
pub fn padding(entries: usize, block: usize) -> usize {
    let per_block = block / Extent::SIZE;
    entries.next_multiple_of(per_block) - entries
}
