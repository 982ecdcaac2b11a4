//! The directory of a writable upper.
//!
//! `N.data` and, in an append-only upper, `N.index` are the upper; the number rises with each seal. `N.layer` is a symbolic
//! link to the layer that upper N is being sealed as: while `N.data` is there the seal has not happened, afterwards
//! it has but may not have reached the disk. [`super::recover`] brings back order after a kill at any moment.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use overlaybd::{CreateUpperError, LayerInfo, Stack, Upper, Uuid};
use rustix::fs::FlockOperation;

use crate::image::files;
use crate::image::spec::check_path;
use crate::image::{recover, UpperMode, UpperSpec};
use crate::{Code, Error};

/// A directory that this process alone uses.
pub struct UpperDir {
    path: PathBuf,
    mode: UpperMode,
    /// Number of the upper in use.
    pub(super) current: u64,
    names: Arc<NameSync>,
    /// Threads that bring sealed layers to stable storage.
    finishing: Vec<JoinHandle<()>>,
}

impl UpperDir {
    /// Takes a directory, making it if it is missing, and finishes or undoes what a killed daemon was doing in it, as far as
    /// that is possible before the layers are open.
    ///
    /// # Errors
    /// [`Code::Busy`] if another image uses it.
    pub fn lock(spec: &UpperSpec) -> Result<Self, Error> {
        check_path(&spec.dir)?;
        let path = spec.dir.clone();
        let opened = DirBuilder::new().recursive(true).mode(0o700).create(&path).and_then(|()| File::open(&path));
        let handle = opened.map_err(|e| Error::io(format_args!("opening upper {}", path.display()), &e))?;
        rustix::fs::flock(&handle, FlockOperation::NonBlockingLockExclusive).map_err(|e| match e {
            rustix::io::Errno::WOULDBLOCK => {
                Error::new(Code::Busy, format!("upper {} is in use by another image", path.display()))
            }
            e => Error::io(format_args!("locking upper {}", path.display()), &e.into()),
        })?;
        let names = Arc::new(NameSync::new(handle));
        let dir = Self { path, mode: spec.mode, current: 0, names, finishing: Vec::new() };
        recover::settle_seals(&dir)
            .map_err(|e| Error::io(format_args!("recovering upper {}", spec.dir.display()), &e))?;
        Ok(dir)
    }

    /// Opens the upper that is there, or makes one on top of `stack`.
    ///
    /// # Errors
    /// [`Code::Corrupt`] if the files are not what they must be, [`Code::Invalid`] if the size is another.
    pub fn open(&mut self, stack: &Arc<Stack>, size: Option<u64>) -> Result<Upper, Error> {
        match recover::open(self, stack)? {
            Some(upper) => {
                let found = upper.info().virtual_size;
                match size {
                    Some(size) if size != found => {
                        let dir = self.path.display();
                        Err(Error::invalid(format!("upper {dir} has {found} bytes, not the {size} asked for")))
                    }
                    _ => Ok(upper),
                }
            }
            None => {
                let size = size.unwrap_or(stack.virtual_size());
                if size < stack.virtual_size() {
                    let least = stack.virtual_size();
                    return Err(Error::invalid(format!("size {size} is less than the {least} bytes of the layers")));
                }
                self.create(self.current, size, stack.top())
            }
        }
    }

    /// Makes empty upper number `n`.
    ///
    /// # Errors
    /// The file system failed, or the size is not one an upper can have.
    pub fn create(&self, n: u64, size: u64, parent: Uuid) -> Result<Upper, Error> {
        let failed = |e: &CreateUpperError| {
            Error::caused(Code::Invalid, format_args!("making an upper in {}", self.path.display()), e)
        };
        self.names.changed();
        let uuid = Uuid::random().map_err(|e| failed(&e.into()))?;
        let info = LayerInfo { virtual_size: size, uuid, parent, user_tag: Vec::new() };
        // The data file comes last: where it is, nothing is missing.
        let index = match self.mode {
            UpperMode::Log => Some(create(&self.index(n)).map_err(|e| failed(&e.into()))?),
            UpperMode::Sparse => None,
        };
        let data = create(&self.data(n)).map_err(|e| {
            if index.is_some() {
                // Or it would be in the way of the next try.
                let _ = files::remove(&self.index(n));
            }
            failed(&e.into())
        })?;
        let upper = match index {
            Some(index) => Upper::create(data, index, info),
            None => Upper::create_sparse(data, info),
        };
        upper.map_err(|e| {
            // What is left over is recognised as never used.
            let _ = self.remove_upper(n);
            failed(&e)
        })
    }

    /// Remembers a thread that brings a sealed layer to stable storage.
    pub(super) fn finishing(&mut self, thread: JoinHandle<()>) {
        self.finishing.retain(|thread| !thread.is_finished());
        self.finishing.push(thread);
    }

    /// Waits until the layers sealed here are on stable storage, or that has failed.
    pub fn wait_for_seals(&mut self) {
        for thread in self.finishing.drain(..) {
            if thread.join().is_err() {
                tracing::error!(dir = %self.path.display(), "a thread that finished a seal panicked");
            }
        }
    }

    /// Removes the files of upper `n`.
    pub(super) fn remove_upper(&self, n: u64) -> io::Result<()> {
        files::remove(&self.data(n)).and_then(|()| files::remove(&self.index(n)))
    }

    /// Removes the upper and, if nothing else is in it, the directory.
    ///
    /// # Errors
    /// The file system failed.
    pub fn discard(self) -> Result<(), Error> {
        let failed = |e: io::Error| Error::io(format_args!("removing upper {}", self.path.display()), &e);
        for n in recover::uppers(&self).map_err(failed)? {
            self.remove_upper(n).map_err(failed)?;
        }
        match rustix::fs::rmdir(&self.path) {
            Ok(()) | Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => Ok(()),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The data file of upper `n`.
    pub fn data(&self, n: u64) -> PathBuf {
        self.path.join(format!("{n}.data"))
    }

    /// The index log of upper `n`.
    pub fn index(&self, n: u64) -> PathBuf {
        self.path.join(format!("{n}.index"))
    }

    /// The link to what upper `n` is sealed as.
    pub fn link(&self, n: u64) -> PathBuf {
        self.path.join(format!("{n}.layer"))
    }

    /// What makes the directory's names durable.
    pub fn names(&self) -> Arc<NameSync> {
        self.names.clone()
    }
}

/// Brings the names in an upper's directory to stable storage with the first flush after they changed.
pub struct NameSync {
    dir: File,
    /// How often names were changed.
    changes: AtomicU64,
    /// How many of those changes are durable.
    synced: AtomicU64,
    turn: Mutex<()>,
}

impl NameSync {
    fn new(dir: File) -> Self {
        Self { dir, changes: AtomicU64::new(1), synced: AtomicU64::new(0), turn: Mutex::new(()) }
    }

    /// Waits until every change up to now is durable.
    ///
    /// # Errors
    /// The file system failed; the call may be repeated.
    pub fn sync(&self) -> io::Result<()> {
        let wanted = self.changes.load(Ordering::Acquire);
        if self.synced.load(Ordering::Acquire) >= wanted {
            return Ok(());
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.synced.load(Ordering::Acquire) < wanted {
            let changes = self.changes.load(Ordering::Acquire);
            self.dir.sync_all()?;
            self.synced.store(changes, Ordering::Release);
        }
        Ok(())
    }

    /// Names have changed.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Lets others have the directory, although somebody may still hold this for a moment.
    pub fn unlock(&self) {
        if let Err(error) = rustix::fs::flock(&self.dir, FlockOperation::Unlock) {
            tracing::warn!(%error, "an upper's directory stays locked until the daemon ends");
        }
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Opens a file of an upper for reading and writing.
pub(super) fn open_rw(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}
