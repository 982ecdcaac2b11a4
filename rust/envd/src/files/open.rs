//! Opening regular files, and only those, for clients.
//!
//! Opening a FIFO waits for the other side and opening a device can have effects (a watchdog starts to count). So a path is
//! first resolved to a handle that opens nothing (`O_PATH`), the handle's type is checked, and the handle is opened.

use std::fs::{File, Metadata};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{open, Mode, OFlags};
use rustix::io::Errno;

use crate::filesystem::error::{FsError, FsErrorKind};
use crate::filesystem::place::make_parents;
use crate::users::User;

/// Mode of a new file: 0666 less the usual umask, whatever envd's own umask is.
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// Neither block nor become a terminal's owner.
const ALWAYS: OFlags = OFlags::CLOEXEC.union(OFlags::NOCTTY).union(OFlags::NONBLOCK);

/// Opens `path` for reading. Blocks.
///
/// # Errors
/// `not_found`; `invalid_argument` for what is not a regular file.
pub fn read(path: &Path) -> Result<(File, Metadata), FsError> {
    let handle = resolve(path).map_err(|errno| FsError::errno("open", path, errno))?;
    let (file, metadata) = reopen(handle, path, OFlags::RDONLY)?;
    Ok((file, metadata))
}

/// A file opened for an upload.
pub struct Target {
    /// Empty, at its beginning.
    pub file: File,
    /// Whether it did not exist before.
    pub created: bool,
}

/// Creates `path` and its missing parents, these owned by `owner`, or empties the regular file it leads to. Blocks.
///
/// # Errors
/// `invalid_argument` when the path is taken by something else; `no space`.
pub fn write(path: &Path, owner: &User) -> Result<Target, FsError> {
    let create = OFlags::WRONLY | OFlags::CREATE | ALWAYS;
    make_parents(path, owner)?;
    match open(path, create | OFlags::EXCL, FILE_MODE) {
        Ok(file) => return Ok(Target { file: file.into(), created: true }),
        Err(Errno::EXIST | Errno::ISDIR) => {}
        Err(errno) => return Err(FsError::errno("create", path, errno)),
    }
    match resolve(path) {
        Ok(handle) => {
            let (file, _) = reopen(handle, path, OFlags::WRONLY | OFlags::TRUNC)?;
            Ok(Target { file, created: false })
        }
        // A link to a file that does not exist yet.
        Err(Errno::NOENT) => match open(path, create, FILE_MODE) {
            Ok(file) => Ok(Target { file: file.into(), created: false }),
            Err(errno) => Err(FsError::errno("create", path, errno)),
        },
        Err(errno) => Err(FsError::errno("open", path, errno)),
    }
}

fn resolve(path: &Path) -> Result<OwnedFd, Errno> {
    open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a handle if it is that of a regular file. Nothing is looked up by name again.
fn reopen(handle: OwnedFd, path: &Path, flags: OFlags) -> Result<(File, Metadata), FsError> {
    let handle = File::from(handle);
    let metadata = handle.metadata().map_err(|error| FsError::io("stat", path, &error))?;
    if metadata.is_dir() {
        return Err(FsError::invalid(format!("path '{}' is a directory", path.display())));
    }
    if !metadata.is_file() {
        let message = format!("path '{}' is a device, FIFO or socket, not a regular file", path.display());
        return Err(FsError::invalid(message));
    }
    let own_link = format!("/proc/self/fd/{}", handle.as_raw_fd());
    match open(own_link, flags | ALWAYS, Mode::empty()) {
        Ok(file) => Ok((file.into(), metadata)),
        Err(Errno::NOENT) => Err(FsError::new(FsErrorKind::Internal, "cannot open files: /proc is not mounted")),
        Err(errno) => Err(FsError::errno("open", path, errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn write(path: &Path) -> Result<Target, FsError> {
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        let home = "/".into();
        super::write(path, &User { name: "me".into(), uid, gid, groups: vec![gid], home, shell: "/bin/sh".into() })
    }

    #[test]
    fn only_regular_files_and_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/null"), dir.path()] {
            assert_eq!(read(path).unwrap_err().kind, FsErrorKind::InvalidArgument, "{}", path.display());
            assert_eq!(write(path).err().unwrap().kind, FsErrorKind::InvalidArgument, "{}", path.display());
        }
        assert_eq!(read(&dir.path().join("gone")).unwrap_err().kind, FsErrorKind::NotFound);
    }

    #[test]
    fn writing_creates_or_empties_and_keeps_the_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/f");
        let mut target = write(&path).unwrap();
        assert!(target.created);
        assert_eq!(target.file.metadata().unwrap().permissions().mode() & 0o777, 0o644);
        target.file.write_all(b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o751)).unwrap();
        let target = write(&path).unwrap();
        assert!(!target.created);
        let metadata = target.file.metadata().unwrap();
        assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (0, 0o751));
    }

    #[test]
    fn writing_follows_links_also_to_what_does_not_exist_yet() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        symlink("real", &link).unwrap();
        for content in ["1", "2"] {
            let mut target = write(&link).unwrap();
            assert!(!target.created);
            target.file.write_all(content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(dir.path().join("real")).unwrap(), content);
        }
    }
}
