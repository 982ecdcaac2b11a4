//! Counters of the cache.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

/// Live counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) joined: AtomicU64,
    pub(super) fetched: AtomicU64,
    pub(super) stored: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) damaged: AtomicU64,
    pub(super) bypassed: AtomicU64,
    pub(super) ahead: AtomicU64,
}

/// Adds one.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// What the cache holds and did since it was opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CacheStats {
    /// Bound in bytes.
    pub limit_bytes: u64,
    /// Bytes counted on disk, at most `limit_bytes`.
    pub used_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Layers with something on disk, open or not.
    pub layers: usize,
    /// Layers that are open.
    pub open_layers: usize,
    /// Blocks on disk of the layers that were opened since the start.
    pub blocks: u64,
    /// Blocks read from disk.
    pub hits: u64,
    /// Blocks a reader had to wait for because it was the first.
    pub misses: u64,
    /// Blocks a reader waited for that somebody else was already fetching.
    pub joined: u64,
    /// Blocks fetched from origins, whoever asked.
    pub fetched: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Blocks evicted.
    pub evicted: u64,
    /// Blocks found torn or rotten, and fetched again.
    pub damaged: u64,
    /// Blocks fetched but not stored: no space, or the cache's disk fails.
    pub bypassed: u64,
    /// Blocks asked for by read-ahead and prefetch.
    pub ahead: u64,
    /// Requests sent to origins.
    pub origin_requests: u64,
    /// Body bytes received from origins.
    pub origin_bytes: u64,
    /// Requests repeated after a failure.
    pub origin_retries: u64,
    /// Credentials renewed.
    pub origin_refreshes: u64,
    /// Open layers that must not be read: key and reason.
    pub poisoned: Vec<(String, String)>,
}
