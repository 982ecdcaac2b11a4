//! Files that appear complete or not at all.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, CWD};
use rustix::io::Errno;

use crate::image::spec::check_path;
use crate::{Code, Error};

/// A file that is being written and has no name yet, so that a killed daemon leaves nothing behind.
pub struct NewFile {
    file: File,
    target: PathBuf,
    /// Where it is meanwhile, on file systems that need a name.
    temporary: Option<PathBuf>,
}

impl NewFile {
    /// Starts a file that will be `target`.
    ///
    /// # Errors
    /// [`Code::Exists`] if there is one already; its directory is missing or not writable.
    pub fn create(target: &Path) -> Result<Self, Error> {
        check_path(target)?;
        let (Some(dir), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(Error::invalid(format!("{} names no file", target.display())));
        };
        if target.symlink_metadata().is_ok() {
            return Err(Error::new(Code::Exists, format!("{} exists already", target.display())));
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (file, temporary) = match rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => (File::from(fd), None),
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let temporary = dir.join(format!(".{}.new", name.to_string_lossy()));
                let mut options = OpenOptions::new();
                let file = options.read(true).write(true).create(true).truncate(true).mode(0o600).open(&temporary);
                (file.map_err(|e| failed(target, &e))?, Some(temporary))
            }
            Err(error) => return Err(failed(target, &error.into())),
        };
        Ok(Self { file, target: target.to_owned(), temporary })
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Brings the file to stable storage and gives it its name.
    ///
    /// # Errors
    /// [`Code::Exists`] if another file has the name by now; the file system failed.
    pub fn publish(self) -> Result<(), Error> {
        let published = || -> io::Result<()> {
            self.file.sync_all()?;
            match &self.temporary {
                None => {
                    let fd = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                    rustix::fs::linkat(CWD, fd, CWD, &self.target, AtFlags::SYMLINK_FOLLOW)?;
                }
                Some(temporary) => std::fs::hard_link(temporary, &self.target)?,
            }
            sync_parent(&self.target)
        };
        published().map_err(|e| failed(&self.target, &e))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // It is written over when the same target is tried again.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

fn failed(target: &Path, error: &io::Error) -> Error {
    Error::io(format_args!("writing {}", target.display()), error)
}

/// Brings a file's name to stable storage.
///
/// # Errors
/// The file system failed.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

/// Removes a file that may be gone already.
///
/// # Errors
/// The file system failed.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_appears_when_it_is_published() {
        let dir = tempfile::tempdir().expect("directory");
        let target = dir.path().join("layer");
        let new = NewFile::create(&target).expect("new file");
        new.file().write_all(b"bytes").expect("written");
        assert!(std::fs::read_dir(dir.path()).expect("listed").all(|entry| entry.expect("entry").path() != target));
        new.publish().expect("published");
        assert_eq!(std::fs::read(&target).expect("read"), b"bytes");
        assert_eq!(NewFile::create(&target).err().map(|e| e.code), Some(Code::Exists));
    }

    #[test]
    fn the_first_of_two_wins() {
        let dir = tempfile::tempdir().expect("directory");
        let target = dir.path().join("layer");
        let (a, b) = (NewFile::create(&target).expect("a"), NewFile::create(&target).expect("b"));
        a.publish().expect("published");
        assert_eq!(b.publish().err().map(|e| e.code), Some(Code::Exists));
        assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 1);
    }
}
