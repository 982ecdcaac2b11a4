//! The writable top of an image.
//!
//! *Append-only*: a write goes to the end of the data file and is noted in an index log beside it, unless all of it
//! replaces bytes that lie in one piece. Parts of those leave garbage behind; sealing and compacting removes it.
//!
//! *Sparse*: every sector has its place in one sparse file and is written there again and again; the file
//! system's own map of holes is the index, so there is no log and no garbage, at the price of 4096-byte
//! granularity and of writing real zeroes over what a lower layer holds.

mod io;
mod log;
mod open;
mod seal;
mod sparse;

use std::fs::File;
use std::io::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use crate::index::{ExtentMap, Segment};
use crate::lsmt::{Extent, LayerInfo, SECTOR};
use crate::source::{ByteSource, FileSource};
use crate::stack::Stack;
use crate::sync::{lock, read};
use log::IndexLog;

pub use open::{CreateUpperError, OpenUpperError};
pub use seal::SealError;

/// Why writes cannot be made durable.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum FlushError {
    /// bringing data to stable storage failed
    Data(#[source] Error),
    /// bringing the index log to stable storage failed
    Index(#[source] Error),
}

impl FlushError {
    /// The kernel's error number: what a guest should be told.
    pub fn raw_os_error(&self) -> Option<i32> {
        let (Self::Data(error) | Self::Index(error)) = self;
        error.raw_os_error()
    }
}

/// How much an upper holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpperStats {
    /// Bytes appended to (or, if sparse, allocated in) the data section.
    pub stored: u64,
    /// Bytes of it that are still in use; the rest is garbage.
    pub live: u64,
    /// Index entries in memory.
    pub extents: usize,
}

/// A writable upper. All operations take `&self` and may run at once.
pub struct Upper {
    data: Arc<File>,
    source: FileSource,
    info: LayerInfo,
    mode: Mode,
    /// Shared by writes while they run, held alone by an unaligned write and by the seal; true once sealed.
    gate: RwLock<bool>,
    /// Held for memory operations only.
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    map: ExtentMap,
    /// Entries that are not in the index log yet. Their data has been written.
    pending: Vec<Extent>,
}

enum Mode {
    Append {
        /// Where the next write goes, in bytes.
        tail: AtomicU64,
        /// From here on, this process has written the file itself, so no two entries share a sector, and what
        /// is written again goes to the place it has.
        own: u64,
        /// Bytes in the file were replaced since it was last brought to stable storage.
        overwritten: AtomicBool,
        log: Mutex<IndexLog>,
    },
    Sparse,
}

impl Mode {
    /// An append-only upper whose next write goes to byte `tail` of the data file.
    fn append(tail: u64, log: IndexLog) -> Self {
        let log = Mutex::new(log);
        Self::Append { tail: AtomicU64::new(tail), own: tail, overwritten: AtomicBool::new(false), log }
    }
}

impl Upper {
    /// What the upper says about itself; its identifier becomes that of the layer.
    pub fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// Whether the upper is a sparse one.
    pub fn is_sparse(&self) -> bool {
        matches!(self.mode, Mode::Sparse)
    }

    /// The unit of direct writes, in bytes.
    pub fn granule(&self) -> u64 {
        match self.mode {
            Mode::Append { .. } => SECTOR,
            Mode::Sparse => sparse::GRANULE,
        }
    }

    /// Whether a range consists of whole granules.
    pub(crate) fn is_aligned(&self, offset: u64, len: u64) -> bool {
        (offset | len) % self.granule() == 0
    }

    /// How much the upper holds now.
    pub fn stats(&self) -> UpperStats {
        let state = read(&self.state);
        let live = state.map.data_sectors() * SECTOR;
        let stored = match &self.mode {
            Mode::Append { tail, .. } => tail.load(Ordering::Relaxed) - crate::HEADER_SPACE,
            Mode::Sparse => live,
        };
        UpperStats { stored, live, extents: state.map.len() }
    }

    pub(crate) fn source(&self) -> &dyn ByteSource {
        &self.source
    }

    /// Splits the sectors `start..end` by where they live, here or in the stack beneath.
    pub(crate) fn resolve(&self, stack: &Stack, start: u64, end: u64, out: &mut Vec<Segment>) {
        let layer = stack.layers().len() as u16;
        let mut at = start;
        // Bisecting the stack needs no I/O, so it may as well happen under the lock.
        let state = read(&self.state);
        state.map.for_each_overlapping(start, end, |extent| {
            stack.resolve(at, extent.offset(), out);
            Segment::push(out, Segment::of(extent, layer));
            at = extent.end();
        });
        drop(state);
        stack.resolve(at, end, out);
    }

    /// Makes every write that has returned durable.
    ///
    /// Data reaches stable storage before the entries that point to it, so the index log never names bytes that
    /// are not there.
    ///
    /// # Errors
    /// [`FlushError`]; nothing is lost and the call may be repeated.
    pub fn flush(&self) -> Result<(), FlushError> {
        let Mode::Append { log, overwritten, .. } = &self.mode else {
            return rustix::fs::fdatasync(&self.data).map_err(|e| FlushError::Data(e.into()));
        };
        let mut log = lock(log);
        let pending = std::mem::take(&mut crate::sync::write(&self.state).pending);
        if !overwritten.swap(false, Ordering::Acquire) && pending.is_empty() && !log.is_dirty() {
            return Ok(());
        }
        let flushed = rustix::fs::fdatasync(&self.data)
            .map_err(|e| FlushError::Data(e.into()))
            .and_then(|()| log.append(&pending).and_then(|()| log.sync()).map_err(FlushError::Index));
        if flushed.is_err() {
            overwritten.store(true, Ordering::Release);
            self.put_back(pending);
        }
        flushed
    }

    /// Returns entries to the front of those waiting, after their append failed.
    fn put_back(&self, mut entries: Vec<Extent>) {
        let mut state = crate::sync::write(&self.state);
        entries.append(&mut state.pending);
        state.pending = entries;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Uuid;

    #[test]
    fn replaced_bytes_are_flushed_although_no_entry_waits() {
        let file = || tempfile::tempfile().expect("file");
        let info = LayerInfo { virtual_size: 1 << 20, uuid: Uuid::from_bytes([1; 16]), ..LayerInfo::default() };
        let upper = Upper::create(file(), file(), info).expect("upper");
        let waits = || match &upper.mode {
            Mode::Append { overwritten, .. } => (overwritten.load(Ordering::Relaxed), read(&upper.state).pending.len()),
            Mode::Sparse => (false, 0),
        };
        upper.write(&[1; 8192], 0).expect("write");
        assert_eq!(waits(), (false, 1));
        upper.flush().expect("flush");
        assert_eq!(waits(), (false, 0));
        upper.write(&[2; 512], 1024).expect("write");
        assert_eq!(waits(), (true, 0));
        upper.flush().expect("flush");
        assert_eq!(waits(), (false, 0));
    }
}
