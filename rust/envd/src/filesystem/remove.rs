//! `Remove`: a file, or a directory with everything in it.
//!
//! A guest can build trees deeper than any path can name and deeper than our stack and descriptor limit, and can move
//! directories while they are being removed. So the walk is a loop that holds one directory at a time, steps down by name
//! without following symlinks, and steps up through `..`, checking that it came back to where it had been.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{fstat, openat, statat, unlinkat, AtFlags, Dir, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;

use super::error::{FsError, FsErrorKind};

/// How often a directory that fills up again while it is being removed is emptied before giving up.
const MAX_ATTEMPTS: u32 = 3;

/// Removes `path` and all below it; symlinks themselves, not what they lead to. A path that does not exist is no error.
/// Stops at the first thing that cannot be removed; what was removed before stays removed. Blocks.
///
/// # Errors
/// `invalid_argument` for `/`; `permission_denied`; `failed_precondition` (mount point, read-only, moved or refilled meanwhile).
pub fn remove(path: &Path) -> Result<(), FsError> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(FsError::invalid(format!("refusing to remove '{}'", path.display())));
    };
    let failed = |errno| FsError::errno("remove", path, errno);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = match openat(CWD, parent, flags, Mode::empty()) {
        Ok(parent) => parent,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        Err(errno) => return Err(failed(errno)),
    };
    match remove_unless_directory(&parent, name) {
        Ok(Removed::Gone) => Ok(()),
        Ok(Removed::IsDirectory) => Walk::start(path, parent, name.to_owned())?.run(),
        Err(errno) => Err(failed(errno)),
    }
}

enum Removed {
    Gone,
    IsDirectory,
}

/// A directory on the way from the top to the current one.
struct Level {
    name: OsString,
    /// Device and inode of the directory above.
    parent: (u64, u64),
    /// Subdirectories that are still to be removed.
    subdirectories: Vec<OsString>,
    attempts: u32,
}

struct Walk<'a> {
    path: &'a Path,
    above_top: OwnedFd,
    current: OwnedFd,
    levels: Vec<Level>,
}

impl<'a> Walk<'a> {
    fn start(path: &'a Path, above_top: OwnedFd, name: OsString) -> Result<Self, FsError> {
        let failed = |errno| FsError::errno("remove", path, errno);
        let current = open_directory(&above_top, &name, OFlags::NOFOLLOW).map_err(failed)?;
        let parent = identity(&above_top).map_err(failed)?;
        let mut walk = Self { path, above_top, current, levels: Vec::new() };
        walk.levels.push(Level { name, parent, subdirectories: Vec::new(), attempts: 0 });
        walk.empty_current()?;
        Ok(walk)
    }

    fn run(mut self) -> Result<(), FsError> {
        while let Some(level) = self.levels.last_mut() {
            match level.subdirectories.pop() {
                Some(name) => self.descend(name)?,
                None => self.remove_current()?,
            }
        }
        Ok(())
    }

    fn descend(&mut self, name: OsString) -> Result<(), FsError> {
        let child = match open_directory(&self.current, &name, OFlags::NOFOLLOW) {
            Ok(child) => child,
            Err(Errno::NOENT) => return Ok(()),
            // Replaced by something else meanwhile: emptying the directory once more will find that.
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            Err(errno) => return Err(self.error(errno)),
        };
        let parent = identity(&self.current).map_err(|errno| self.error(errno))?;
        self.levels.push(Level { name, parent, subdirectories: Vec::new(), attempts: 0 });
        self.current = child;
        self.empty_current()
    }

    /// Unlinks what is no directory in the current one and notes what is.
    fn empty_current(&mut self) -> Result<(), FsError> {
        let subdirectories = empty(&self.current).map_err(|errno| self.error(errno))?;
        if let Some(level) = self.levels.last_mut() {
            level.subdirectories = subdirectories;
            level.attempts += 1;
        }
        Ok(())
    }

    /// Removes the current directory, which should be empty, and goes back to the one above.
    fn remove_current(&mut self) -> Result<(), FsError> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        let opened;
        let parent = if self.levels.len() == 1 {
            &self.above_top
        } else {
            opened = open_directory(&self.current, "..", OFlags::empty()).map_err(|errno| self.error(errno))?;
            &opened
        };
        if identity(parent).map_err(|errno| self.error(errno))? != level.parent {
            let message = format!("cannot remove '{}': it was moved meanwhile", self.location().display());
            return Err(FsError::new(FsErrorKind::FailedPrecondition, message));
        }
        match unlinkat(parent, &level.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) if level.attempts < MAX_ATTEMPTS => return self.empty_current(),
            Err(errno) => return Err(self.error(errno)),
        }
        let above = parent.try_clone().map_err(|error| FsError::io("remove", &self.location(), &error))?;
        self.current = above;
        self.levels.pop();
        Ok(())
    }

    fn location(&self) -> PathBuf {
        let mut path = self.path.to_path_buf();
        path.extend(self.levels.iter().skip(1).map(|level| &level.name));
        path
    }

    fn error(&self, errno: Errno) -> FsError {
        FsError::errno("remove", &self.location(), errno)
    }
}

/// Unlinks everything in `dir` that is no directory; returns the names of what is.
fn empty(dir: &OwnedFd) -> Result<Vec<OsString>, Errno> {
    let mut subdirectories = Vec::new();
    let readable = openat(dir, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for entry in Dir::new(readable)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let is_directory = entry.file_type() == FileType::Directory
            || matches!(remove_unless_directory(dir, OsStr::from_bytes(name.to_bytes()))?, Removed::IsDirectory);
        if is_directory {
            subdirectories.push(OsString::from_vec(CString::from(name).into_bytes()));
        }
    }
    Ok(subdirectories)
}

fn remove_unless_directory(dir: &OwnedFd, name: &OsStr) -> Result<Removed, Errno> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(Removed::Gone),
        Err(Errno::ISDIR) => Ok(Removed::IsDirectory),
        // POSIX's answer for a directory, but also that of sticky directories and immutable files.
        Err(Errno::PERM) => {
            let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => Ok(Removed::IsDirectory),
                _ => Err(Errno::PERM),
            }
        }
        Err(errno) => Err(errno),
    }
}

/// A handle to step from; it needs no permission to read the directory.
fn open_directory(dir: impl AsFd, name: impl rustix::path::Arg, flags: OFlags) -> Result<OwnedFd, Errno> {
    openat(dir, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | flags, Mode::empty())
}

fn identity(dir: impl AsFd) -> Result<(u64, u64), Errno> {
    let stat = fstat(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::mkdirat;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn removes_files_links_and_trees_but_nothing_behind_links() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir_all(tree.join("c")).unwrap();
        fs::write(tree.join("a/b/f"), "").unwrap();
        symlink(&outside, tree.join("a/link")).unwrap();
        remove(&tree).unwrap();
        assert!(!tree.exists());
        assert!(outside.join("kept").exists());
        let link = dir.path().join("link");
        symlink(&outside, &link).unwrap();
        remove(&link).unwrap();
        assert!(outside.join("kept").exists());
        remove(&outside.join("kept")).unwrap();
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn a_missing_path_is_fine_and_the_root_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        remove(&dir.path().join("gone")).unwrap();
        remove(&dir.path().join("gone/below")).unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        remove(&dir.path().join("f/below")).unwrap();
        assert_eq!(remove(Path::new("/")).unwrap_err().kind, FsErrorKind::InvalidArgument);
    }

    #[test]
    fn a_tree_deeper_than_a_path_can_name_and_wider_than_one_read() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut at = open_directory(CWD, &top, OFlags::empty()).unwrap();
        for _ in 0..1200 {
            mkdirat(&at, "deeper", Mode::RWXU).unwrap();
            at = open_directory(&at, "deeper", OFlags::NOFOLLOW).unwrap();
        }
        for i in 0..300 {
            fs::create_dir(top.join(format!("d{i}"))).unwrap();
            fs::write(top.join(format!("f{i}")), "").unwrap();
        }
        drop(at);
        remove(&top).unwrap();
        assert!(!top.exists());
    }
}
