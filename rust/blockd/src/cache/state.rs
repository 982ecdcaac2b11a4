//! What is known of one layer, in memory: one byte per block of it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::files::{Files, SHARING};
use super::flight::{lock, Flights};
use super::layout::{block_charge, blocks_of, Key};

/// Nothing on disk.
const ABSENT: u8 = 0;
/// Being stored or erased: not readable, and nobody else may touch its bytes.
const BUSY: u8 = 1;
/// Stored.
const PRESENT: u8 = 2;
/// With `PRESENT`: read since the hand of the clock passed last.
const READ: u8 = 4;
/// With `PRESENT`: stored since then. Without it the hand would follow a sequential reader and take what was just fetched
/// ahead of it; apart from `READ`, so that what is read again outlives what was only passed by.
const FRESH: u8 = 8;

/// A layer in the cache, open or not.
pub(super) struct LayerState {
    pub(super) key: Key,
    pub(super) size: u64,
    pub(super) flights: Flights,
    /// Filled from the meta file when the layer is first opened, or first met by the hand of the clock.
    blocks: OnceLock<Box<[AtomicU8]>>,
    present: AtomicU32,
    /// What is counted for the layer while its blocks are not known.
    pub(super) unloaded: AtomicU64,
    files: Mutex<Weak<Files>>,
    /// Why the layer must not be read any more.
    poison: OnceLock<String>,
    verified: AtomicBool,
}

impl LayerState {
    /// A layer whose blocks are not known yet and that has `unloaded` bytes on disk.
    pub(super) fn new(key: Key, size: u64, unloaded: u64) -> Self {
        Self {
            key,
            size,
            flights: Flights::default(),
            blocks: OnceLock::new(),
            present: AtomicU32::new(0),
            unloaded: AtomicU64::new(unloaded),
            files: Mutex::new(Weak::new()),
            poison: OnceLock::new(),
            verified: AtomicBool::new(false),
        }
    }

    /// The open files, if the layer is open.
    pub(super) fn open_files(&self) -> Option<Arc<Files>> {
        lock(&self.files).upgrade()
    }

    /// The open files; `create` makes them if there are none.
    pub(super) fn files(&self, dir: &Path, create: bool) -> std::io::Result<Arc<Files>> {
        let mut files = lock(&self.files);
        if let Some(files) = files.upgrade() {
            return Ok(files);
        }
        let open = if create { Files::open_or_create(dir, &self.key, self.size) } else { Files::open(dir, &self.key) };
        let open = Arc::new(open?);
        *files = Arc::downgrade(&open);
        Ok(open)
    }

    /// Learns which blocks are stored, once. Returns by how much the bytes counted for the layer were too many (or, if
    /// negative, too few), for the one call that learnt it.
    pub(super) fn load(&self, files: Option<&Files>) -> i64 {
        let mut correction = 0;
        self.blocks.get_or_init(|| {
            let blocks: Box<[AtomicU8]> =
                std::iter::repeat_with(AtomicU8::default).take(blocks_of(self.size) as usize).collect();
            let mut charge = 0;
            let loaded = files.map(|files| {
                files.load(|block| {
                    blocks[block as usize].store(PRESENT, Ordering::Relaxed);
                    self.present.fetch_add(1, Ordering::Relaxed);
                    charge += block_charge(self.size, block);
                })
            });
            if let Some(Err(error)) = loaded {
                tracing::warn!(key = self.key.as_str(), %error, "part of a cached layer cannot be read");
            }
            correction = self.unloaded.swap(0, Ordering::AcqRel) as i64 - charge as i64;
            blocks
        });
        correction
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.blocks.get().is_some()
    }

    /// Blocks stored.
    pub(super) fn present(&self) -> u32 {
        self.present.load(Ordering::Relaxed)
    }

    /// The number of blocks.
    pub(super) fn count(&self) -> u32 {
        blocks_of(self.size)
    }

    fn block(&self, block: u32) -> Option<&AtomicU8> {
        self.blocks.get()?.get(block as usize)
    }

    /// Whether a block is stored.
    pub(super) fn is_present(&self, block: u32) -> bool {
        self.block(block).is_some_and(|state| state.load(Ordering::Acquire) & PRESENT != 0)
    }

    /// Whether a block is stored; if so it counts as read. The common case writes no shared memory.
    pub(super) fn touch(&self, block: u32) -> bool {
        let Some(state) = self.block(block) else { return false };
        let now = state.load(Ordering::Acquire);
        if now & (PRESENT | READ) == PRESENT {
            let _ = state.compare_exchange(now, now | READ, Ordering::AcqRel, Ordering::Relaxed);
        }
        now & PRESENT != 0
    }

    /// Takes an absent block for storing.
    pub(super) fn begin_store(&self, block: u32) -> bool {
        self.block(block)
            .is_some_and(|state| state.compare_exchange(ABSENT, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Ends [`LayerState::begin_store`].
    pub(super) fn end_store(&self, block: u32, stored: bool) {
        if let Some(state) = self.block(block) {
            if stored {
                self.present.fetch_add(1, Ordering::Relaxed);
            }
            state.store(if stored { PRESENT | FRESH } else { ABSENT }, Ordering::Release);
        }
    }

    /// Takes a stored block for erasing.
    pub(super) fn begin_erase(&self, block: u32) -> bool {
        let taken = self.block(block).is_some_and(|state| {
            let take = |now: u8| (now & PRESENT != 0).then_some(BUSY);
            state.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
        });
        if taken {
            self.present.fetch_sub(1, Ordering::Relaxed);
        }
        taken
    }

    /// Ends [`LayerState::begin_erase`].
    pub(super) fn end_erase(&self, block: u32) {
        if let Some(state) = self.block(block) {
            state.store(ABSENT, Ordering::Release);
        }
    }

    /// Whether no other block has checksums on the same page as this one.
    pub(super) fn alone(&self, block: u32) -> bool {
        let first = block - block % SHARING;
        (first..first + SHARING)
            .filter(|other| *other != block)
            .filter_map(|other| self.block(other))
            .all(|state| state.load(Ordering::Acquire) == ABSENT)
    }

    /// Moves the hand of the clock through this layer from block `from`: takes one mark off each block it passes, and takes
    /// the first block without marks. Returns that block.
    pub(super) fn sweep(&self, from: u32) -> Option<u32> {
        for (index, state) in self.blocks.get()?.iter().enumerate().skip(from as usize) {
            let now = state.load(Ordering::Relaxed);
            if now & PRESENT == 0 {
                continue;
            }
            let next = match now {
                _ if now & FRESH != 0 => now & !FRESH,
                _ if now & READ != 0 => now & !READ,
                _ => BUSY,
            };
            let moved = state.compare_exchange(now, next, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if moved && next == BUSY {
                self.present.fetch_sub(1, Ordering::Relaxed);
                return Some(index as u32);
            }
        }
        None
    }

    /// Forbids all further reads.
    pub(super) fn set_poison(&self, why: String) {
        self.poison.get_or_init(|| why);
    }

    pub(super) fn poison(&self) -> Option<&str> {
        self.poison.get().map(String::as_str)
    }

    pub(super) fn set_verified(&self) {
        self.verified.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Relaxed)
    }
}
