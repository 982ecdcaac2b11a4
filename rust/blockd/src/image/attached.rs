//! One attached image, as the targets serve it.

use std::error::Error as StdError;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use overlaybd::{Image, Layer, Place, Segment, SECTOR};
use rustix::io::Errno;

use crate::image::ahead::{self, ReadAhead};
use crate::image::upper::NameSync;
use crate::image::{Gate, Handles, LayerSpec, Owner, Recorder, UpperDir};
use crate::{Code, Error};

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

/// How an image is shown.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// Who may open it.
    pub owner: Owner,
    /// Whether everybody may read it.
    pub shared: bool,
    /// Whether to note the order in which it is read.
    pub record: bool,
}

/// An image with a name. All methods may run at once.
///
/// It is blank until it is bound to its layers, once. Until then it reads as zeroes, which a VMM that opens it may look at.
pub struct Attached {
    name: String,
    node: u64,
    size: u64,
    image: OnceLock<Image>,
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
    /// A blank image of `size` bytes, with the directory of its upper if it is to have one.
    pub fn blank(name: &str, node: u64, size: u64, upper: Option<UpperDir>, manner: Manner) -> Self {
        Self {
            name: name.to_owned(),
            node,
            size,
            writable: upper.is_some(),
            names: upper.as_ref().map(UpperDir::names),
            recorder: manner.record.then(|| Recorder::new(size)),
            ahead: ReadAhead::default(),
            files: Mutex::default(),
            image: OnceLock::new(),
            owner: manner.owner,
            shared: manner.shared,
            attached_at: SystemTime::now(),
            handles: Handles::default(),
            gate: Gate::default(),
            counters: Counters::default(),
            upper: Mutex::new(upper),
        }
    }

    /// Gives it its content, and notes the files of its layers. To be called under [`Attached::upper`] once others see it.
    ///
    /// # Errors
    /// [`Code::Exists`] if it has one, [`Code::Invalid`] if that is of another size.
    pub fn bind(&self, image: Image, layers: &[LayerSpec]) -> Result<(), Error> {
        let (name, size, found) = (&self.name, self.size, image.size());
        if found != size {
            return Err(Error::invalid(format!("image {name} has {size} bytes, not {found}")));
        }
        let stack = image.stack();
        // Held over both: whoever sees the layers sees their files.
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        self.image.set(image).map_err(|_| self.already_bound())?;
        let known =
            stack.layers().iter().zip(layers).filter_map(|(layer, spec)| Some((address(layer), spec.path.clone()?)));
        files.extend(known);
        Ok(())
    }

    /// What whoever comes second with a stack is told.
    pub fn already_bound(&self) -> Error {
        Error::new(Code::Exists, format!("image {} has its layers already: it is not blank", self.name))
    }

    /// Whether it has no content yet.
    pub fn is_blank(&self) -> bool {
        self.image.get().is_none()
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
        self.size
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
        let stack = self.image.get().map(Image::stack);
        let is_used = |known| stack.iter().flat_map(|stack| stack.layers()).any(|layer| address(layer) == known);
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|(known, _)| is_used(*known));
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
    ///
    /// # Errors
    /// [`Code::Invalid`] while it is blank.
    pub fn image(&self) -> Result<&Image, Error> {
        let blank = || Error::invalid(format!("image {} is blank: it must be bound to its layers first", self.name));
        self.image.get().ok_or_else(blank)
    }

    /// Splits the sectors `start..end` by where they live now. A blank image is one hole.
    pub fn resolve(&self, start: u64, end: u64) -> Vec<Segment> {
        match self.image.get() {
            Some(image) => image.resolve(start, end),
            None => vec![Segment { offset: start, len: end - start, place: Place::Hole }],
        }
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
        let wanted = buf.len() as u64;
        let len = match self.image.get() {
            Some(image) => image.read_at(buf, offset).map_err(|error| self.failed("read", offset, wanted, &error))?,
            None => {
                let len = self.size.saturating_sub(offset).min(wanted) as usize;
                buf[..len].fill(0);
                len
            }
        };
        if let Some(recorder) = &self.recorder {
            recorder.note(offset, len as u64);
        }
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.counters.read_bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(len)
    }

    /// Has the kernel read ahead what a read like this one announces. To be called once that is answered.
    pub fn read_ahead(self: &Arc<Self>, offset: u64, len: u64) {
        if let Some(range) = self.ahead.note(offset, len, self.size()) {
            ahead::soon(self, range);
        }
    }

    /// Has the kernel read a range soon; it may take a while until it has taken note.
    pub(super) fn fetch(&self, range: Range<u64>) {
        if let Some(image) = self.image.get() {
            image.read_ahead(range.start, range.end - range.start);
        }
    }

    /// Writes, less than asked for at the end of the image.
    ///
    /// # Errors
    /// `ENOSPC` if the disk beneath is full or nothing lies inside the image, `EROFS` without an upper, else `EIO`: also while
    /// it is blank.
    pub fn write(&self, data: &[u8], offset: u64) -> Result<usize, Errno> {
        let len = self.size().saturating_sub(offset).min(data.len() as u64);
        if len == 0 && !data.is_empty() {
            return Err(Errno::NOSPC);
        }
        let failed = |error: &(dyn StdError + 'static)| self.failed("write", offset, len, error);
        let image = self.image().map_err(|blank| failed(&blank))?;
        image.write_at(&data[..len as usize], offset).map_err(|error| failed(&error))?;
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
        let image = self.image().map_err(|blank| self.failed("zero", offset, len, &blank))?;
        image.zero_at(offset, len).map_err(|error| self.failed("zero", offset, len, &error))
    }

    /// Brings every write that has returned to stable storage: while it is blank, none.
    ///
    /// # Errors
    /// `ENOSPC` or `EIO`; the call may be repeated.
    pub fn flush(&self) -> Result<(), Errno> {
        let Some(image) = self.image.get() else { return Ok(()) };
        image.flush().map_err(|error| self.failed("flush", 0, 0, &error))?;
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
            for segment in self.resolve(at, step) {
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
            let cause = Error::caused(Code::Io, action, error).message;
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
