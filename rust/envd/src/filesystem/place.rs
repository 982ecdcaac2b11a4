//! `MakeDir` and `Move`, and the missing parents that they and uploads create.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{fchown, open, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::error::{FsError, FsErrorKind};
use super::transfer;
use crate::users::User;

/// Mode of every directory made for a client, less the umask.
const DIRECTORY_MODE: u32 = 0o755;

/// Makes the directory `path` with its missing parents, all owned by `owner`. Blocks.
///
/// # Errors
/// `already_exists` when it is a directory already; `invalid_argument` when something else is in the way.
pub fn make_dir(path: &Path, owner: &User) -> Result<(), FsError> {
    let taken = |path: &Path| match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            FsError::new(FsErrorKind::AlreadyExists, format!("directory '{}' already exists", path.display()))
        }
        _ => FsError::invalid(format!("path '{}' exists and is not a directory", path.display())),
    };
    if fs::symlink_metadata(path).is_ok() {
        return Err(taken(path));
    }
    make_parents(path, owner)?;
    match make_one(path, owner) {
        Err(error) if error.kind == FsErrorKind::AlreadyExists => Err(taken(path)),
        made => made,
    }
}

/// Makes the directories above `path` that are missing, owned by `owner`. Blocks.
///
/// # Errors
/// `invalid_argument` when a component above is no directory; what the kernel answered otherwise.
pub fn make_parents(path: &Path, owner: &User) -> Result<(), FsError> {
    let mut missing = Vec::new();
    for ancestor in path.ancestors().skip(1) {
        match fs::metadata(ancestor) {
            Ok(metadata) if metadata.is_dir() => break,
            Ok(_) => return Err(FsError::invalid(format!("'{}' is not a directory", ancestor.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(ancestor),
            // Below something that is no directory: the loop will come to it and name it.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
            Err(error) => return Err(FsError::io("create directories of", path, &error)),
        }
    }
    for directory in missing.into_iter().rev() {
        match make_one(directory, owner) {
            // Someone else was faster, which is fine unless it is a broken link or a file.
            Err(error) if error.kind == FsErrorKind::AlreadyExists && directory.is_dir() => {}
            Err(error) if error.kind == FsErrorKind::AlreadyExists => {
                return Err(FsError::invalid(format!("'{}' exists and is not a directory", directory.display())));
            }
            made => made?,
        }
    }
    Ok(())
}

/// Renames `source` to `destination`, making missing parents (owned by `owner`) and replacing what may be replaced (rename(2)).
/// To another file system it is copied, see [`transfer`]. Blocks.
///
/// # Errors
/// `not_found` for the source; `failed_precondition` for a destination that is a directory with something in it;
/// `invalid_argument` for a directory moved into itself, or a file onto a directory or the reverse; `no space`.
pub fn rename(source: &Path, destination: &Path, owner: &User) -> Result<(), FsError> {
    fs::symlink_metadata(source).map_err(|error| FsError::io("move", source, &error))?;
    if destination.starts_with(source) && destination != source {
        return Err(FsError::invalid(format!(
            "cannot move '{}' into itself ('{}')",
            source.display(),
            destination.display()
        )));
    }
    make_parents(destination, owner)?;
    match fs::rename(source, destination) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => transfer::transfer(source, destination),
        renamed => renamed.map_err(|error| FsError::io("move to", destination, &error)),
    }
}

/// Gives an open file or directory to `owner`. A file system that knows no owners (or not this one) keeps its own.
///
/// # Errors
/// What else the kernel answers.
pub fn give(file: impl AsFd, path: &Path, owner: &User) -> Result<(), FsError> {
    match fchown(file, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid))) {
        Ok(()) | Err(Errno::PERM | Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(FsError::errno("change the owner of", path, errno)),
    }
}

fn make_one(path: &Path, owner: &User) -> Result<(), FsError> {
    DirBuilder::new()
        .mode(DIRECTORY_MODE)
        .create(path)
        .map_err(|error| FsError::io("create directory", path, &error))?;
    // By handle: what has come into its place meanwhile, if it is a link, is not given away.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = open(path, flags, Mode::empty()).map_err(|errno| FsError::errno("open directory", path, errno))?;
    give(made, path, owner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};

    /// Somebody else, where the test may give files away.
    fn owner() -> User {
        let (uid, gid) = match nix::unistd::geteuid() {
            root if root.is_root() => (12_345, 23_456),
            own => (own.as_raw(), nix::unistd::getegid().as_raw()),
        };
        User { name: "u".into(), uid, gid, groups: vec![gid], home: "/".into(), shell: "/bin/sh".into() }
    }

    fn make_dir(path: &Path) -> Result<(), FsError> {
        super::make_dir(path, &owner())
    }

    fn rename(source: &Path, destination: &Path) -> Result<(), FsError> {
        super::rename(source, destination, &owner())
    }

    #[test]
    fn make_dir_makes_parents_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/c");
        make_dir(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755);
        for made in [path.as_path(), path.parent().unwrap()] {
            let metadata = fs::metadata(made).unwrap();
            assert_eq!((metadata.uid(), metadata.gid()), (owner().uid, owner().gid));
        }
        assert_eq!(make_dir(&path).unwrap_err().kind, FsErrorKind::AlreadyExists);
        assert_eq!(make_dir(&dir.path().join("a")).unwrap_err().kind, FsErrorKind::AlreadyExists);
    }

    #[test]
    fn make_dir_refuses_what_is_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "").unwrap();
        symlink("gone", dir.path().join("broken")).unwrap();
        for name in ["f", "f/below", "f/far/below", "broken", "broken/below"] {
            assert_eq!(make_dir(&dir.path().join(name)).unwrap_err().kind, FsErrorKind::InvalidArgument, "{name}");
        }
        assert!(!dir.path().join("gone").exists());
    }

    #[test]
    fn rename_makes_parents_and_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let (source, destination) = (dir.path().join("s"), dir.path().join("x/y/d"));
        for content in ["1", "2"] {
            fs::write(&source, content).unwrap();
            rename(&source, &destination).unwrap();
            assert_eq!(fs::read_to_string(&destination).unwrap(), content);
            assert!(!source.exists());
        }
    }

    #[test]
    fn rename_errors() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("d/e")).unwrap();
        fs::create_dir_all(at("full/x")).unwrap();
        fs::write(at("f"), "").unwrap();
        let kind = |from: &str, to: &str| rename(&at(from), &at(to)).unwrap_err().kind;
        assert_eq!(kind("gone", "new/parent"), FsErrorKind::NotFound);
        assert!(!at("new").exists());
        assert_eq!(kind("d", "d/e/f"), FsErrorKind::InvalidArgument);
        assert_eq!(kind("d", "full"), FsErrorKind::FailedPrecondition);
        assert_eq!(kind("f", "d"), FsErrorKind::InvalidArgument);
        assert_eq!(kind("d", "f"), FsErrorKind::InvalidArgument);
    }
}
