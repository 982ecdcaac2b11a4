//! What all layers of a cache share: the bound, the eviction, the memory budget.

use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::files::Files;
use super::layout::{block_charge, block_len};
use super::registry::{Met, Registry};
use super::state::LayerState;
use super::stats::{count, Counters};
use crate::origin::{Lane, OriginStats};

/// After the disk was full, blocks are not stored for so long.
const BYPASS: Duration = Duration::from_secs(5);

/// The heart of a cache.
pub(super) struct Shared {
    pub(super) dir: PathBuf,
    pub(super) limit: u64,
    pub(super) registry: Registry,
    pub(super) counters: Counters,
    pub(super) origin_stats: Arc<OriginStats>,
    pub(super) runtime: Handle,
    /// Blocks in memory, for each lane: how many there may be at once.
    pub(super) demand_buffers: Arc<Semaphore>,
    pub(super) background_buffers: Arc<Semaphore>,
    pub(super) started: Instant,
    /// Milliseconds after `started` until which nothing is stored.
    pub(super) bypass_until: AtomicU64,
}

impl Shared {
    /// Runs `work` on the cache's threads and waits for it.
    pub(super) fn wait<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        match Handle::try_current() {
            // A blocking thread of another runtime may wait; `block_on` would refuse there only on its workers.
            Ok(_) => std::thread::scope(|scope| {
                let waiter = scope.spawn(|| self.runtime.block_on(work));
                waiter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }),
            Err(_) => self.runtime.block_on(work),
        }
    }

    pub(super) fn buffers(&self, lane: Lane) -> &Arc<Semaphore> {
        match lane {
            Lane::Demand => &self.demand_buffers,
            Lane::Background => &self.background_buffers,
        }
    }

    /// Stores a fetched block if there is room for it. Failing is no error for anyone: the next reader fetches it again.
    pub(super) fn store(&self, layer: &LayerState, files: &Files, block: u32, bytes: &[u8]) {
        if self.now() < self.bypass_until.load(Relaxed) || layer.poison().is_some() || !layer.begin_store(block) {
            count(&self.counters.bypassed);
            return;
        }
        let charge = block_charge(layer.size, block);
        let mut stored = false;
        if self.make_room(charge) {
            stored = self.write(layer, files, block, bytes);
            if !stored {
                self.registry.used.fetch_sub(charge, Relaxed);
            }
        }
        layer.end_store(block, stored);
        // Whoever poisoned the layer meanwhile erased what was stored then: this block, if it saw it, or else it is ours to erase.
        std::sync::atomic::fence(SeqCst);
        if layer.poison().is_some() && layer.begin_erase(block) {
            self.erase(layer, block);
        }
        count(if stored { &self.counters.stored } else { &self.counters.bypassed });
    }

    fn write(&self, layer: &LayerState, files: &Files, block: u32, bytes: &[u8]) -> bool {
        for last in [false, true] {
            let Err(error) = files.write(block, bytes) else { return true };
            // Best effort: a block without its checksums is not there, and its space is found by the next start.
            let _ = files.erase(block, layer.alone(block));
            let full = matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded);
            // Others filled the disk: give the coldest block for this one, so that the cache keeps up with what is hot.
            if !full || last || !self.evict_one() {
                self.bypass_until.store(self.now() + BYPASS.as_millis() as u64, Relaxed);
                tracing::warn!(%error, pause = ?BYPASS, "the cache's disk takes no blocks; reads go to the origin");
                break;
            }
        }
        false
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Counts `charge` more bytes, evicting what is cold if need be. False if that is not possible.
    fn make_room(&self, charge: u64) -> bool {
        let fits = |used: u64| used.checked_add(charge).filter(|used| *used <= self.limit);
        while self.registry.used.fetch_update(Relaxed, Relaxed, fits).is_err() {
            if !self.evict_one() {
                return false;
            }
        }
        true
    }

    /// Brings the count below the limit.
    pub(super) fn shrink(&self) {
        while self.registry.used.load(Relaxed) > self.limit && self.evict_one() {}
    }

    /// Makes one step towards more room. False if there is nothing to evict.
    fn evict_one(&self) -> bool {
        match self.registry.advance() {
            Met::Block(layer, block) => {
                self.erase(&layer, block);
                count(&self.counters.evicted);
                if layer.present() == 0 {
                    self.registry.forget(&self.dir, &layer, false);
                }
            }
            Met::Unknown(layer) => {
                let files = layer.files(&self.dir, false).ok();
                self.registry.learn(&layer, files.as_deref());
            }
            Met::Empty(layer) => self.registry.forget(&self.dir, &layer, false),
            Met::Nothing => return false,
        }
        true
    }

    /// Erases a block that was taken for it.
    fn erase(&self, layer: &LayerState, block: u32) {
        // No files (the directory was emptied beneath us): nothing to erase.
        let erased = match layer.files(&self.dir, false) {
            Ok(files) => files.erase(block, layer.alone(block)),
            Err(_) => Ok(()),
        };
        match erased {
            Ok(()) => drop(self.registry.used.fetch_sub(block_charge(layer.size, block), Relaxed)),
            Err(error) => tracing::warn!(%error, key = layer.key.as_str(), block, "a cached block cannot be erased"),
        }
        layer.end_erase(block);
    }

    /// Drops a block that was found damaged.
    pub(super) fn drop_damaged(&self, layer: &LayerState, block: u32) {
        if layer.begin_erase(block) {
            tracing::warn!(key = layer.key.as_str(), block, "a cached block is damaged and is fetched again");
            self.erase(layer, block);
            count(&self.counters.damaged);
        }
    }

    /// Makes a layer unreadable and removes all that is stored of it.
    pub(super) fn poison(&self, layer: &Arc<LayerState>, why: String) {
        layer.set_poison(why);
        std::sync::atomic::fence(SeqCst);
        self.erase_all(layer);
        self.registry.forget(&self.dir, layer, true);
    }

    /// Removes all that is stored of a layer now.
    pub(super) fn erase_all(&self, layer: &Arc<LayerState>) {
        for block in 0..layer.count() {
            if layer.begin_erase(block) {
                self.erase(layer, block);
            }
        }
    }

    /// Bytes of the block.
    pub(super) fn len(layer: &LayerState, block: u32) -> usize {
        block_len(layer.size, block)
    }
}
