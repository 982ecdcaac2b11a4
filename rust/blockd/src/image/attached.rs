//! One attached image, as the targets serve it.

use std::error::Error as StdError;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use overlaybd::{Image, Layer, Place, SECTOR};
use rustix::io::Errno;

use crate::image::ahead::ReadAhead;
use crate::image::upper::NameSync;
use crate::image::{Gate, Handles, Owner, Recorder, UpperDir};

/// Sectors whose places are looked up at a time when seeking, so that a fragmented image costs bounded memory.
const SEEK_STEP: u64 = 1 << 16;

/// What to look for in [`Attached::seek`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next byte that a layer or the upper holds.
    Data,
    /// The next byte that reads as zero because nothing holds it.
    Hole,
}

/// What was done with an image since it was attached.
#[derive(Debug, Default)]
pub struct Counters {
    /// Read requests.
    pub reads: AtomicU64,
    /// Bytes read.
    pub read_bytes: AtomicU64,
    /// Write requests.
    pub writes: AtomicU64,
    /// Bytes written.
    pub written_bytes: AtomicU64,
    /// Requests to bring writes to stable storage.
    pub flushes: AtomicU64,
    /// Requests that failed.
    pub errors: AtomicU64,
}

/// An image with a name. All methods may run at once.
pub struct Attached {
    name: String,
    node: u64,
    image: Image,
    writable: bool,
    owner: Owner,
    shared: bool,
    attached_at: SystemTime,
    handles: Handles,
    gate: Gate,
    counters: Counters,
    recorder: Option<Recorder>,
    ahead: ReadAhead,
    names: Option<Arc<NameSync>>,
    /// The layers' files, by the address of the layer, which the stack keeps from being used again.
    files: Mutex<Vec<(usize, PathBuf)>>,
    /// Held by whoever changes what the image is made of: one seal, swap or detach at a time.
    upper: Mutex<Option<UpperDir>>,
}

impl Attached {
    /// An image, with the directory of its upper if it has one; `shared` if everybody may read it.
    pub fn new(
        name: &str,
        node: u64,
        image: Image,
        upper: Option<UpperDir>,
        owner: Owner,
        shared: bool,
        record: bool,
    ) -> Self {
        Self {
            name: name.to_owned(),
            node,
            writable: upper.is_some(),
            names: upper.as_ref().map(UpperDir::names),
            recorder: record.then(|| Recorder::new(image.size())),
            ahead: ReadAhead::default(),
            files: Mutex::default(),
            image,
            owner,
            shared,
            attached_at: SystemTime::now(),
            handles: Handles::default(),
            gate: Gate::default(),
            counters: Counters::default(),
            upper: Mutex::new(upper),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its node number in the mount, never used for another image.
    pub fn node(&self) -> u64 {
        self.node
    }

    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        self.image.size()
    }

    /// Whether it has an upper.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Who may open it.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// Whether everybody may read it.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Notes the file of one of its layers.
    pub fn note_file(&self, layer: &Arc<Layer>, path: &Path) {
        let stack = self.image.stack();
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|(known, _)| stack.layers().iter().any(|layer| address(layer) == *known));
        files.push((address(layer), path.to_owned()));
    }

    /// The file that one of its layers was opened from or became; none for one that has only an origin.
    pub fn file(&self, layer: &Arc<Layer>) -> Option<PathBuf> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.iter().rev().find(|(known, _)| *known == address(layer)).map(|(_, path)| path.clone())
    }

    /// When it was attached.
    pub fn attached_at(&self) -> SystemTime {
        self.attached_at
    }

    /// Who has it open.
    pub fn handles(&self) -> &Handles {
        &self.handles
    }

    /// Its share of the workers.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// What was done with it.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The order in which it was read, if that is recorded.
    pub fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_ref()
    }

    /// The layers and the upper.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Takes the lock under which the image's make-up changes.
    pub fn upper(&self) -> MutexGuard<'_, Option<UpperDir>> {
        self.upper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads, less than asked for at the end of the image.
    ///
    /// # Errors
    /// `EIO`; the log names the layer and the cause.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let result = self.image.read_at(buf, offset);
        let len = result.map_err(|error| self.failed("read", offset, buf.len() as u64, &error))?;
        if let Some(recorder) = &self.recorder {
            recorder.note(offset, len as u64);
        }
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.counters.read_bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(len)
    }

    /// Has the kernel read ahead what a read like this one announces. To be called once that is answered.
    pub fn read_ahead(&self, offset: u64, len: u64) {
        if let Some(range) = self.ahead.note(offset, len, self.size()) {
            self.image.read_ahead(range.start, range.end - range.start);
        }
    }

    /// Writes, less than asked for at the end of the image.
    ///
    /// # Errors
    /// `ENOSPC` if the disk beneath is full or nothing lies inside the image, `EROFS` without an upper, else `EIO`.
    pub fn write(&self, data: &[u8], offset: u64) -> Result<usize, Errno> {
        let len = self.size().saturating_sub(offset).min(data.len() as u64);
        if len == 0 && !data.is_empty() {
            return Err(Errno::NOSPC);
        }
        let result = self.image.write_at(&data[..len as usize], offset);
        result.map_err(|error| self.failed("write", offset, len, &error))?;
        self.counters.writes.fetch_add(1, Ordering::Relaxed);
        self.counters.written_bytes.fetch_add(len, Ordering::Relaxed);
        Ok(len as usize)
    }

    /// Makes a range read as zeroes and gives its space back where possible. What lies beyond the image is ignored.
    ///
    /// # Errors
    /// As for [`Attached::write`].
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), Errno> {
        let len = len.min(self.size().saturating_sub(offset));
        self.image.zero_at(offset, len).map_err(|error| self.failed("zero", offset, len, &error))
    }

    /// Brings every write that has returned to stable storage.
    ///
    /// # Errors
    /// `ENOSPC` or `EIO`; the call may be repeated.
    pub fn flush(&self) -> Result<(), Errno> {
        self.image.flush().map_err(|error| self.failed("flush", 0, 0, &error))?;
        if let Some(names) = &self.names {
            names.sync().map_err(|error| self.failed("flush", 0, 0, &error))?;
        }
        self.counters.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Finds the next data or hole at or after `offset`.
    ///
    /// # Errors
    /// `ENXIO` if there is none, or `offset` is not inside the image.
    pub fn seek(&self, offset: u64, what: Seek) -> Result<u64, Errno> {
        if offset >= self.size() {
            return Err(Errno::NXIO);
        }
        let end = self.size().div_ceil(SECTOR);
        let mut at = offset / SECTOR;
        while at < end {
            let step = (at + SEEK_STEP).min(end);
            for segment in self.image.resolve(at, step) {
                let is_data = matches!(segment.place, Place::Data { .. });
                if is_data == (what == Seek::Data) {
                    return Ok((segment.offset * SECTOR).max(offset));
                }
            }
            at = step;
        }
        match what {
            Seek::Data => Err(Errno::NXIO),
            Seek::Hole => Ok(self.size()),
        }
    }

    /// Counts and logs a failure, and gives what the guest is told. Of failures that repeat, the log has the 1st, 2nd, 4th,
    /// 8th and so on: a guest that retries for ever must not fill the disk.
    fn failed(&self, action: &str, offset: u64, len: u64, error: &(dyn StdError + 'static)) -> Errno {
        let failures = self.counters.errors.fetch_add(1, Ordering::Relaxed) + 1;
        if failures.is_power_of_two() {
            let cause = crate::Error::caused(crate::Code::Io, action, error).message;
            tracing::warn!(image = self.name, offset, len, failures, "{cause}");
        }
        errno(error)
    }
}

fn address(layer: &Arc<Layer>) -> usize {
    Arc::as_ptr(layer) as usize
}

fn errno(error: &(dyn StdError + 'static)) -> Errno {
    let mut next = Some(error);
    while let Some(cause) = next {
        if matches!(cause.downcast_ref(), Some(overlaybd::WriteError::ReadOnly)) {
            return Errno::ROFS;
        }
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)) {
            return Errno::NOSPC;
        }
        next = cause.source();
    }
    Errno::IO
}
