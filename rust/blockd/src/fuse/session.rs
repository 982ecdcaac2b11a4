//! The worker threads and how they share the work.

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use zerocopy::FromBytes;

use super::abi::{InHeader, ReadWriteIn};
use super::buffer::Buffer;
use super::{notify, ops};
use crate::image::{Attached, Table};
use crate::Error;

/// Most bytes of one read or write. The kernel splits larger ones and sends the parts at once, so larger buffers gain
/// nothing, and this bounds what idle workers hold.
pub(super) const MAX_IO: usize = 256 << 10;
/// The data of a write, and of the answer to a read, starts on a page of the worker's buffer.
pub(super) const DATA_AT: usize = 4096;
/// Bytes before the data of a write: two structures of the protocol.
const HEAD: usize = size_of::<InHeader>() + size_of::<ReadWriteIn>();
const REQUEST_AT: usize = DATA_AT - HEAD;
/// Workers that wait for requests when there are none; more would only take turns with colder caches.
const KEEP_IDLE: usize = 2;
/// Most workers at once. Each may be waiting for a disk or a remote origin.
const MAX_WORKERS: usize = 256;
/// After a worker had to be started, none ends for this long: bursts would start and end one for every request.
const LINGER: Duration = Duration::from_secs(1);
/// Milliseconds between the ends of two workers.
const STEP: u64 = 20;
/// Stack of a worker.
const STACK: usize = 256 << 10;

/// Serves the images of a table on one FUSE connection.
pub struct Session {
    pub(super) device: Arc<File>,
    pub(super) table: Arc<Table>,
    /// Workers alive.
    workers: AtomicUsize,
    /// Workers waiting for a request.
    idle: AtomicUsize,
    /// When a worker was last started or ended, in milliseconds after `started`.
    changed: AtomicU64,
    started: Instant,
}

impl Session {
    /// Starts serving on a connection that has just been mounted. It ends when the mount is gone.
    ///
    /// # Errors
    /// The first thread cannot be started.
    pub fn start(device: Arc<File>, table: Arc<Table>) -> Result<Arc<Self>, Error> {
        let (workers, idle) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (changed, started) = (AtomicU64::new(0), Instant::now());
        let session = Arc::new(Self { device, table, workers, idle, changed, started });
        session.spawn().map_err(|e| Error::io("starting a FUSE worker", &e))?;
        Ok(session)
    }

    /// Makes the kernel drop the pages it cached of an image that is there.
    pub fn forget_content(&self, image: &Attached) {
        if let Err(error) = notify::forget_content(&self.device, image.node()) {
            tracing::warn!(image = image.name(), %error, "the kernel keeps cached pages of an image that was bound");
        }
    }

    /// Makes the kernel drop what it cached of a detached image: above all its pages.
    pub fn forget(&self, image: &Attached) {
        if let Err(error) = notify::forget(&self.device, image.node(), image.name()) {
            tracing::warn!(image = image.name(), %error, "the kernel keeps cached pages of a detached image");
        }
    }

    /// Workers alive now.
    pub fn workers(&self) -> usize {
        self.workers.load(Ordering::Relaxed)
    }

    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let buffer = Buffer::new(DATA_AT + MAX_IO)?;
        let session = self.clone();
        self.workers.fetch_add(1, Ordering::Relaxed);
        // Counted as idle before it runs, so that its maker starts no second one for the same reason.
        self.idle.fetch_add(1, Ordering::Relaxed);
        let started =
            std::thread::Builder::new().name("fuse".into()).stack_size(STACK).spawn(move || session.work(buffer));
        if started.is_err() {
            self.workers.fetch_sub(1, Ordering::Relaxed);
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
        started.map(drop)
    }

    fn work(self: Arc<Self>, mut buffer: Buffer) {
        loop {
            let len = match (&*self.device).read(&mut buffer.bytes()[REQUEST_AT..]) {
                Ok(len) => len,
                Err(error) => match Errno::from_io_error(&error) {
                    // The request was withdrawn before it could be read, or a signal came.
                    Some(Errno::NOENT | Errno::INTR | Errno::AGAIN) => continue,
                    // Unmounted or aborted.
                    Some(Errno::NODEV | Errno::NOTCONN | Errno::CONNABORTED) => break,
                    _ => {
                        tracing::error!(%error, "reading FUSE requests failed; the mount is dead");
                        break;
                    }
                },
            };
            if self.idle.fetch_sub(1, Ordering::Relaxed) == 1 {
                self.spawn_another();
            }
            let request = &buffer.bytes()[REQUEST_AT..REQUEST_AT + len];
            if let Ok((header, _)) = InHeader::read_from_prefix(request) {
                ops::answer(&self, &header, &mut buffer.bytes()[REQUEST_AT + size_of::<InHeader>()..], len);
            }
            if self.idle.fetch_add(1, Ordering::Relaxed) >= KEEP_IDLE && self.may_end() {
                break;
            }
        }
        self.idle.fetch_sub(1, Ordering::Relaxed);
        self.workers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a superfluous worker may end now: one at a time, and only when none was started lately.
    fn may_end(&self) -> bool {
        let now = self.started.elapsed().as_millis() as u64;
        let changed = self.changed.load(Ordering::Relaxed);
        now.saturating_sub(changed) >= LINGER.as_millis() as u64
            && self
                .changed
                .compare_exchange(
                    changed,
                    now - (LINGER.as_millis() as u64 - STEP),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok()
    }

    fn spawn_another(self: &Arc<Self>) {
        if self.workers() >= MAX_WORKERS {
            return;
        }
        self.changed.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
        if let Err(error) = self.spawn() {
            tracing::warn!(%error, workers = self.workers(), "no further FUSE worker can be started");
        }
    }
}
