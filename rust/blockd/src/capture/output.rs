//! The layer's file: invisible until it is whole, gone if it never is.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use overlaybd::{Digest, DigestWriter, Uuid};
use rustix::fs::{fsync, linkat, openat, unlinkat, AtFlags, Mode, OFlags, CWD};
use rustix::io::Errno;

use super::CaptureError;

/// Bytes hashed at a time.
const HASH_STEP: usize = 256 * 1024;

/// A file without a name, so that not even `kill -9` leaves anything; where the file system has no such files, one with a
/// temporary name (`.<name>.<random>.tmp`).
pub struct Output {
    path: PathBuf,
    dir: OwnedFd,
    name: OsString,
    file: Arc<File>,
    temporary: Option<String>,
}

impl Output {
    /// Creates the file, readable by its owner only: it will hold a guest's memory.
    pub fn create(path: &Path) -> Result<Self, CaptureError> {
        Self::create_with(path, OFlags::TMPFILE)
    }

    fn create_with(path: &Path, unnamed: OFlags) -> Result<Self, CaptureError> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(CaptureError::Invalid(format!("the output {path:?} is not the path of a file")));
        };
        if path.symlink_metadata().is_ok() {
            return Err(CaptureError::Exists(path.into()));
        }
        let failed = |e: Errno| CaptureError::output(path, io::Error::from(e));
        let dir = openat(CWD, parent, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let dir = dir.map_err(failed)?;
        let (mode, flags) = (Mode::RUSR | Mode::WUSR, OFlags::RDWR | OFlags::CLOEXEC);
        let (file, temporary) = match openat(&dir, ".", flags | unnamed, mode) {
            Ok(file) => (file, None),
            // Not known to this file system.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {
                let random = Uuid::random().map_err(|e| CaptureError::output(path, e))?;
                let name = format!(".{}.{random}.tmp", name.to_string_lossy());
                let file = openat(&dir, &name, flags | OFlags::CREATE | OFlags::EXCL, mode).map_err(failed)?;
                (file, Some(name))
            }
            Err(e) => return Err(failed(e)),
        };
        Ok(Self { path: path.into(), dir, name: name.into(), file: Arc::new(file.into()), temporary })
    }

    /// The open file.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Gives the file its name; if `durable`, after its bytes have reached stable storage.
    pub fn publish(self, durable: bool) -> Result<(), CaptureError> {
        let named = || -> Result<(), Errno> {
            if durable {
                fsync(&self.file)?;
            }
            match &self.temporary {
                Some(temporary) => linkat(&self.dir, temporary, &self.dir, &self.name, AtFlags::empty())?,
                None => {
                    let unnamed = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                    linkat(CWD, unnamed, &self.dir, &self.name, AtFlags::SYMLINK_FOLLOW)?;
                }
            }
            match durable {
                true => fsync(&self.dir),
                false => Ok(()),
            }
        };
        named().map_err(|e| match e {
            Errno::EXIST => CaptureError::Exists(self.path.clone()),
            e => CaptureError::output(&self.path, io::Error::from(e)),
        })
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            if let Err(e) = unlinkat(&self.dir, temporary, AtFlags::empty()) {
                tracing::warn!(path = ?self.path, "removing the temporary file {temporary} failed: {e}");
            }
        }
    }
}

/// How far a file is written, for the thread that hashes it meanwhile.
#[derive(Default)]
pub struct Progress {
    state: Mutex<Written>,
    changed: Condvar,
}

#[derive(Default, Clone, Copy)]
struct Written {
    bytes: u64,
    ended: bool,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Written> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hashes a file while it grows, until its writer is dropped. The bytes come from the page cache they were just written to.
    pub fn follow(&self, file: &File) -> io::Result<Digest> {
        let mut hash = DigestWriter::new(io::sink());
        let mut buf = vec![0; HASH_STEP];
        let mut hashed = 0;
        loop {
            let mut written = self.lock();
            // Whole steps while there is more to come, as waking for each small write would cost more than the hashing.
            while !written.ended && written.bytes - hashed < HASH_STEP as u64 {
                written = self.changed.wait(written).unwrap_or_else(PoisonError::into_inner);
            }
            let step = (written.bytes - hashed).min(HASH_STEP as u64) as usize;
            drop(written);
            if step == 0 {
                return Ok(hash.finish().1);
            }
            file.read_exact_at(&mut buf[..step], hashed)?;
            hash.write_all(&buf[..step])?;
            hashed += step as u64;
        }
    }
}

/// Writes a file front to back and tells how far it is.
pub struct Tracked {
    file: Arc<File>,
    progress: Arc<Progress>,
}

impl Tracked {
    /// Takes an empty file.
    pub fn new(file: Arc<File>, progress: Arc<Progress>) -> Self {
        Self { file, progress }
    }
}

impl Write for Tracked {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let written = (&*self.file).write(buf)?;
        self.progress.lock().bytes += written as u64;
        self.progress.changed.notify_one();
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.progress.lock().ended = true;
        self.progress.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With and without files that have no name: opening a directory for writing fails as it does where there are none.
    const WAYS: [OFlags; 2] = [OFlags::TMPFILE, OFlags::DIRECTORY];

    fn names(dir: &Path) -> Vec<OsString> {
        std::fs::read_dir(dir).expect("dir").map(|entry| entry.expect("entry").file_name()).collect()
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        for (unnamed, meanwhile) in WAYS.into_iter().zip([0, 1]) {
            let dir = tempfile::tempdir().expect("dir");
            let path = dir.path().join("layer");
            let create = || Output::create_with(&path, unnamed).expect("created");
            let dropped = create();
            assert_eq!(names(dir.path()).len(), meanwhile);
            assert!(!path.exists());
            drop(dropped);
            assert!(names(dir.path()).is_empty());

            let (first, second) = (create(), create());
            first.file().write_all_at(b"bytes", 0).expect("written");
            first.publish(true).expect("published");
            let late = second.publish(false).expect_err("there already");
            assert!(matches!(late, CaptureError::Exists(_)), "{late}");
            assert_eq!(names(dir.path()), ["layer"]);
            assert_eq!(std::fs::read(&path).expect("layer"), b"bytes");
        }
    }

    #[test]
    fn a_growing_file_is_hashed() {
        let file = Arc::new(tempfile::tempfile().expect("file"));
        let progress = Arc::new(Progress::default());
        let mut tracked = Tracked::new(file.clone(), progress.clone());
        let mut expected = DigestWriter::new(io::sink());
        let digest = std::thread::scope(|scope| {
            let following = scope.spawn(|| progress.follow(&file));
            for len in [1, HASH_STEP, 3 * HASH_STEP + 17, 0, 5] {
                let bytes = vec![len as u8; len];
                tracked.write_all(&bytes).expect("written");
                expected.write_all(&bytes).expect("hashed");
            }
            drop(tracked);
            following.join().expect("no panic").expect("hashed")
        });
        assert_eq!(digest, expected.finish().1);
    }
}
