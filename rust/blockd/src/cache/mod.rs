//! The block cache: one directory, bounded in bytes, through which all remote layers of a node are read.
//!
//! [`Cache::open_layer`] makes a [`LayerSource`] of a URL. Reading it works like this:
//!
//! 1. The block is stored (one byte of memory per block of a layer says so): its bytes and the checksums of the 4 KiB
//!    chunks wanted are read from the layer's two files and compared. No lock, no allocation, two system calls.
//! 2. Somebody else fetches it: wait for that ([`flight`]).
//! 3. Otherwise claim it, together with the blocks that will be wanted next ([`readahead`]), and fetch them in one range
//!    request ([`fetch`]). Readers get each block as soon as it is whole; then it is stored ([`shared`]).
//!
//! Because every read is verified, eviction, crashes and bit rot need no ordering and no syncing: a read that meets bytes
//! which do not match their checksums fetches the block again. The bound is kept by counting before writing; cold blocks
//! go first by the CLOCK algorithm over all layers, open or not ([`registry`]). Files and their meaning are described in
//! `docs/formats/blockd-cache.md`.
//!
//! What a layer's blocks are filed under decides who can put bytes there for whom. A declared digest is only a claim until
//! all bytes were read, so it is filed under digest *and* URL (without the query, which may be a signature): a hostile
//! origin cannot put bytes into the layer of another. Without a digest it is URL and validator; without a validator
//! nothing says that the object is still the same, so its blocks are not kept beyond the last close.

mod complete;
mod completer;
mod fetch;
mod files;
mod flight;
mod layer;
mod layout;
mod readahead;
mod registry;
mod shared;
mod source;
mod state;
mod stats;

pub use complete::CompleteError;
pub use layer::CachedLayer;
pub use layout::{BLOCK, MAX_LAYER};
pub use source::{LayerSource, RemoteLayer};
pub use stats::CacheStats;

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use completer::Completer;
use fetch::Fetcher;
use flight::lock;
use layout::Key;
use registry::Registry;
use shared::Shared;
use stats::Counters;

use crate::origin::{Headers, HttpOrigin, OriginError, OriginOptions, OriginStats, SharedError, Transport};

/// How a cache is set up.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// Where it is; made if it is not there. May be deleted at any time.
    pub dir: PathBuf,
    /// Most bytes on disk.
    pub limit_bytes: u64,
    /// Most fetched bytes in memory, rounded down to whole blocks (at least 4).
    pub memory_bytes: u64,
    /// How patient its origins are.
    pub origin: OriginOptions,
}

impl CacheOptions {
    /// A cache of `limit_bytes` in `dir`, with 6 MiB of memory for blocks on their way.
    pub fn new(dir: impl Into<PathBuf>, limit_bytes: u64) -> Self {
        Self { dir: dir.into(), limit_bytes, memory_bytes: 6 << 20, origin: OriginOptions::default() }
    }
}

/// Why a cache cannot be opened.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum OpenCacheError {
    /// the cache directory {0} is used by another process
    Locked(PathBuf),
    /// the file system of {0} cannot punch holes, which the cache needs to evict blocks
    NoHoles(PathBuf),
    /// the cache directory {0} cannot be used
    Io(PathBuf, #[source] io::Error),
    /// the cache's threads cannot be started
    Threads(#[source] io::Error),
}

/// Why a remote layer cannot be opened.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum OpenRemoteError {
    /// a layer of {0} bytes is impossible
    Size(u64),
    /// the layer's origin cannot be used
    Origin(#[from] SharedError),
    /// the layer's origin cannot be used
    Request(#[from] OriginError),
}

/// The cache of a node. Dropping it ends its threads; layers still open then fail to read what is not stored.
pub struct Cache {
    shared: Arc<Shared>,
    options: CacheOptions,
    transport: OnceLock<Arc<Transport>>,
    open: Mutex<Vec<Weak<CachedLayer>>>,
    completer: Completer,
    runtime: Option<Runtime>,
    _lock: File,
}

impl Cache {
    /// Opens the cache in its directory. Quick: one page is read per layer; blocks are looked at when their layer is opened.
    ///
    /// # Errors
    /// [`OpenCacheError`].
    pub fn open(options: CacheOptions) -> Result<Self, OpenCacheError> {
        let dir = options.dir.clone();
        let failed = |error| OpenCacheError::Io(dir.clone(), error);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(failed)?;
        let lock = File::options().create(true).truncate(false).write(true).open(dir.join("lock")).map_err(failed)?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| OpenCacheError::Locked(dir.clone()))?;
        probe_holes(&lock, &options)?;
        let registry = Registry::scan(&dir).map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(4)
            .thread_name("cache")
            .enable_all()
            .build()
            .map_err(OpenCacheError::Threads)?;
        let buffers = (options.memory_bytes / BLOCK).clamp(4, 1 << 16) as usize;
        let shared = Shared {
            dir,
            limit: options.limit_bytes,
            registry,
            counters: Counters::default(),
            origin_stats: Arc::new(OriginStats::default()),
            runtime: runtime.handle().clone(),
            demand_buffers: Arc::new(Semaphore::new(buffers - buffers / 4)),
            background_buffers: Arc::new(Semaphore::new(buffers / 4)),
            started: Instant::now(),
            bypass_until: AtomicU64::new(0),
        };
        shared.shrink();
        Ok(Self {
            shared: Arc::new(shared),
            options,
            transport: OnceLock::new(),
            open: Mutex::default(),
            completer: Completer::default(),
            runtime: Some(runtime),
            _lock: lock,
        })
    }

    /// Opens a layer: its local file if that is complete, else its origin through the cache. Blocks while the origin is asked
    /// (only if there is no digest); must not be called from an async context of the caller's.
    ///
    /// # Errors
    /// [`OpenRemoteError`].
    pub fn open_layer(&self, layer: RemoteLayer) -> Result<LayerSource, OpenRemoteError> {
        if layer.size == 0 || layer.size > MAX_LAYER {
            return Err(OpenRemoteError::Size(layer.size));
        }
        if let Some(local) = LayerSource::local(&layer) {
            return Ok(local);
        }
        let origin = Arc::new(HttpOrigin::new(
            &layer.url,
            layer.size,
            layer.headers,
            layer.credentials,
            self.transport()?,
            self.options.origin.clone(),
            self.shared.origin_stats.clone(),
        )?);
        let size = layer.size.to_le_bytes();
        let key = if let Some(digest) = &layer.digest {
            Key::new(&[b"digest", &digest.0, origin.shown().as_bytes(), &size], true)
        } else {
            let probe = origin.clone();
            let validator = self.shared.wait(async move { probe.probe().await });
            let validator =
                validator.map_err(|error| SharedError { url: origin.shown().clone(), error: Arc::new(error) })?;
            if validator.is_empty() {
                let nonce = [self.shared.started.elapsed().as_nanos() as u64, fastrand::u64(..)].map(u64::to_le_bytes);
                Key::new(&[b"once", origin.url().as_bytes(), &size, &nonce[0], &nonce[1]], false)
            } else {
                Key::new(&[b"url", origin.url().as_bytes(), validator.identity().as_bytes(), &size], true)
            }
        };
        let (state, files) = self.shared.registry.open(&self.shared.dir, key, layer.size);
        let fetcher = Fetcher { shared: self.shared.clone(), layer: state, files, origin };
        let cached = Arc::new(CachedLayer::new(fetcher, layer.path, layer.digest));
        let mut open = lock(&self.open);
        open.retain(|layer| layer.strong_count() > 0);
        open.push(Arc::downgrade(&cached));
        Ok(LayerSource::Cached(cached))
    }

    /// Makes a layer whole at its path, if it has one, in the background: one layer at a time, behind all readers, and given up
    /// when the layer is closed.
    pub fn complete_later(&self, layer: &LayerSource) {
        if let LayerSource::Cached(layer) = layer {
            if layer.path().is_some() && !layer.is_local() {
                self.completer.add(layer);
            }
        }
    }

    /// Replaces the headers of all open layers whose URL starts with `url_prefix`; returns how many there are.
    pub fn set_headers(&self, url_prefix: &str, headers: &Headers) -> usize {
        let open = self.open_layers();
        let matching = open.iter().filter(|layer| layer.url().starts_with(url_prefix));
        matching.map(|layer| layer.set_headers(headers.clone())).count()
    }

    /// What the cache holds and did.
    pub fn stats(&self) -> CacheStats {
        let layers = self.shared.registry.layers();
        let counters = &self.shared.counters;
        let origin = &self.shared.origin_stats;
        let open = self.open_layers();
        let mut poisoned: Vec<_> = open
            .iter()
            .filter_map(|layer| {
                Some((layer.fetcher.origin.shown().to_string(), layer.fetcher.layer.poison()?.to_owned()))
            })
            .collect();
        poisoned.sort();
        poisoned.dedup();
        CacheStats {
            limit_bytes: self.shared.limit,
            used_bytes: self.shared.registry.used.load(Relaxed),
            block_bytes: BLOCK,
            layers: layers.len(),
            open_layers: open.len(),
            blocks: layers.iter().map(|layer| u64::from(layer.present())).sum(),
            hits: counters.hits.load(Relaxed),
            misses: counters.misses.load(Relaxed),
            joined: counters.joined.load(Relaxed),
            fetched: counters.fetched.load(Relaxed),
            stored: counters.stored.load(Relaxed),
            evicted: counters.evicted.load(Relaxed),
            damaged: counters.damaged.load(Relaxed),
            bypassed: counters.bypassed.load(Relaxed),
            ahead: counters.ahead.load(Relaxed),
            origin_requests: origin.requests.load(Relaxed),
            origin_bytes: origin.bytes.load(Relaxed),
            origin_retries: origin.retries.load(Relaxed),
            origin_refreshes: origin.refreshes.load(Relaxed),
            poisoned,
        }
    }

    fn open_layers(&self) -> Vec<Arc<CachedLayer>> {
        lock(&self.open).iter().filter_map(Weak::upgrade).collect()
    }

    fn transport(&self) -> Result<Arc<Transport>, OriginError> {
        if let Some(transport) = self.transport.get() {
            return Ok(transport.clone());
        }
        let _context = self.shared.runtime.enter();
        let transport = Arc::new(Transport::new(&self.options.origin)?);
        Ok(self.transport.get_or_init(|| transport).clone())
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not waited for: a task may be in the middle of a long wait. Blocks on their way land with an error.
            runtime.shutdown_background();
        }
        self.completer.end();
    }
}

/// Eviction gives space back by punching holes.
fn probe_holes(lock: &File, options: &CacheOptions) -> Result<(), OpenCacheError> {
    use rustix::fs::{fallocate, FallocateFlags};
    let failed = |error| OpenCacheError::Io(options.dir.clone(), error);
    match lock.write_all_at(&[0; 4096], 0) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(()),
        written => written.map_err(failed)?,
    }
    match fallocate(lock, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            Err(OpenCacheError::NoHoles(options.dir.clone()))
        }
        other => other.map_err(|error| failed(error.into())),
    }
}
