//! `Move` to another file system: a copy, and then the removal of the source.
//!
//! The copy grows in a closed directory beside the destination and takes its place by a rename, so the destination is the old
//! one or all of the new one, and nobody but root sees what is in between. Content with its holes, modes, owners, times, hard
//! links among the moved, symlinks, devices, FIFOs and sockets are kept; extended attributes as far as the file system takes them.
//!
//! The walk goes from directory to directory by handle, never through a symlink, whatever happens to the tree meanwhile.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{
    chmodat, chownat, fgetxattr, flistxattr, fsetxattr, fstat, linkat, mkdirat, mknodat, openat, readlinkat, seek,
    statat, symlinkat, utimensat, AtFlags, Dir, FileType, Gid, Mode, OFlags, RawMode, SeekFrom, Stat, Timespec,
    Timestamps, Uid, XattrFlags, CWD,
};
use rustix::io::Errno;

use super::error::{FsError, FsErrorKind};
use super::remove::remove;

/// Most directories in each other. Two handles are held for each level.
const MAX_DEPTH: usize = 256;
/// Longest list of attribute names, and longest value (XATTR_LIST_MAX, XATTR_SIZE_MAX).
const MAX_XATTR: usize = 65_536;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Moves `source` to `destination` by copying it. Until the copy is complete nothing changes; when the source then cannot be
/// removed entirely, both are there. Blocks.
///
/// # Errors
/// `no space`; `failed_precondition` for a tree with a mount point in it or too deep; those of rename(2) and of
/// [`remove`](super::remove::remove).
pub fn transfer(source: &Path, destination: &Path) -> Result<(), FsError> {
    let failed = |error: io::Error| FsError::io("move to", destination, &error);
    let (Some(name), Some(parent)) = (source.file_name(), destination.parent()) else {
        return Err(FsError::invalid(format!("cannot move '{}' to '{}'", source.display(), destination.display())));
    };
    let workshop = make_workshop(parent).map_err(failed)?;
    let placed =
        Copy::run(source, name, &workshop).and_then(|()| fs::rename(workshop.join(name), destination).map_err(failed));
    let cleaned = remove(&workshop);
    placed.and(cleaned)?;
    remove(source).map_err(|error| {
        let message = format!("it is at '{}' now, but the source is still there: {error}", destination.display());
        FsError::new(error.kind, message)
    })
}

/// Makes the directory in which the copy grows.
fn make_workshop(parent: &Path) -> io::Result<PathBuf> {
    loop {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let path = parent.join(format!(".aenv-move-{:x}", now.as_nanos()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|()| path),
        }
    }
}

/// A directory that is being copied.
struct Level {
    from: Rc<OwnedFd>,
    to: Rc<OwnedFd>,
    name: CString,
    stat: Stat,
    /// What is still to be copied.
    rest: Vec<CString>,
}

struct Copy<'a> {
    source: &'a Path,
    /// Device of the source.
    device: u64,
    /// Device and inode of the workshop, which must not be copied into itself.
    workshop: (u64, u64),
    levels: Vec<Level>,
    /// The copies of files with several links, by device and inode: the path below the workshop.
    links: HashMap<(u64, u64), PathBuf>,
}

impl<'a> Copy<'a> {
    fn run(source: &'a Path, name: &OsStr, workshop: &Path) -> Result<(), FsError> {
        let open = |path: &Path| {
            openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| FsError::errno("open", path, errno))
        };
        let from = open(source.parent().unwrap_or(Path::new("/")))?;
        let to = open(workshop)?;
        let failed = |errno| FsError::errno("move", source, errno);
        let name = CString::new(name.as_bytes()).map_err(|_| FsError::invalid("path contains a NUL byte"))?;
        let stat = statat(&from, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        let own = fstat(&to).map_err(failed)?;
        let mut copy = Self {
            source,
            device: stat.st_dev,
            workshop: (own.st_dev, own.st_ino),
            levels: Vec::new(),
            links: HashMap::new(),
        };
        copy.entry(&from, &to, &to, name)?;
        while let Some(level) = copy.levels.last_mut() {
            match level.rest.pop() {
                Some(name) => {
                    let (from, into) = (level.from.clone(), level.to.clone());
                    copy.entry(&from, &into, &to, name)?;
                }
                None => copy.leave(&to)?,
            }
        }
        Ok(())
    }

    /// Copies `name` from one directory to another; of a directory only itself, what is in it comes next.
    fn entry(&mut self, from: &OwnedFd, to: &OwnedFd, workshop: &OwnedFd, name: CString) -> Result<(), FsError> {
        let failed = |errno| FsError::errno("move", &self.location(&name), errno);
        let stat = match statat(from, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) if !self.levels.is_empty() => return Ok(()),
            found => found.map_err(failed)?,
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            return self.enter(from, to, name, stat);
        }
        let identity = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1 {
            if let Some(copy) = self.links.get(&identity) {
                return linkat(workshop, copy, to, &name, AtFlags::empty()).map_err(failed);
            }
        }
        let made = match kind {
            FileType::RegularFile => file(from, to, &name, &stat),
            FileType::Symlink => readlinkat(from, &name, Vec::new())
                .and_then(|target| symlinkat(target, to, &name))
                .and_then(|()| take_after(to, &name, &stat))
                .map_err(Into::into),
            _ => mknodat(to, &name, kind, Mode::RUSR | Mode::WUSR, stat.st_rdev)
                .and_then(|()| take_after(to, &name, &stat))
                .map_err(Into::into),
        };
        made.map_err(|error| FsError::io("move", &self.location(&name), &error))?;
        if stat.st_nlink > 1 {
            let path = self.below_workshop(&name);
            self.links.insert(identity, path);
        }
        Ok(())
    }

    fn enter(&mut self, from: &OwnedFd, to: &OwnedFd, name: CString, stat: Stat) -> Result<(), FsError> {
        let refused = |reason: &str| {
            let message = format!("cannot move '{}' to another file system: {reason}", self.location(&name).display());
            Err(FsError::new(FsErrorKind::FailedPrecondition, message))
        };
        if stat.st_dev != self.device {
            return refused("something is mounted there; unmount it first");
        }
        if (stat.st_dev, stat.st_ino) == self.workshop {
            return refused("the destination is inside the source");
        }
        if self.levels.len() == MAX_DEPTH {
            return refused("it is too deep; pack it with tar");
        }
        let opened = || {
            let from = openat(from, &name, DIRECTORY, Mode::empty())?;
            mkdirat(to, &name, Mode::RWXU)?;
            let to = openat(to, &name, DIRECTORY, Mode::empty())?;
            let mut rest = Vec::new();
            for entry in Dir::read_from(&from)? {
                let entry = entry?;
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    rest.push(entry.file_name().to_owned());
                }
            }
            Ok((from, to, rest))
        };
        let (from, to, rest) = opened().map_err(|errno: Errno| FsError::errno("move", &self.location(&name), errno))?;
        self.levels.push(Level { from: Rc::new(from), to: Rc::new(to), name, stat, rest });
        Ok(())
    }

    /// The current directory is complete.
    fn leave(&mut self, workshop: &OwnedFd) -> Result<(), FsError> {
        let Some(Level { from, to, name, stat, .. }) = self.levels.pop() else { return Ok(()) };
        let above = self.levels.last().map_or(workshop, |level| &level.to);
        take_after(above, &name, &stat).map_err(|errno| FsError::errno("move", &self.location(&name), errno))?;
        copy_xattrs(&from, &to);
        Ok(())
    }

    fn below_workshop(&self, name: &CStr) -> PathBuf {
        let names = self.levels.iter().map(|level| level.name.as_c_str()).chain([name]);
        names.map(|name| OsStr::from_bytes(name.to_bytes())).collect()
    }

    /// For messages.
    fn location(&self, name: &CStr) -> PathBuf {
        self.source.parent().unwrap_or(Path::new("/")).join(self.below_workshop(name))
    }
}

fn file(from: &OwnedFd, to: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<()> {
    // A FIFO that has come into its place meanwhile must not make us wait.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let mut source = File::from(openat(from, name, flags, Mode::empty())?);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut copy = File::from(openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
    let size = source.metadata()?.len();
    // Not more than there was at first: a writer may be faster than we are.
    let mut at = 0;
    while at < size {
        let Some(start) = next_data(&source, at)?.filter(|&start| start < size) else { break };
        // The end of the file counts as a hole.
        at = seek(&source, SeekFrom::Hole(start)).map_or(size, |hole| hole.min(size));
        seek(&source, SeekFrom::Start(start))?;
        seek(&copy, SeekFrom::Start(start))?;
        if io::copy(&mut source.by_ref().take(at - start), &mut copy)? < at - start {
            break;
        }
    }
    copy.set_len(size)?;
    take_after(to, name, stat)?;
    copy_xattrs(&source, &copy);
    Ok(())
}

/// Where the next data at or after `from` begin; `None` when there are no more.
fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(from)) {
        Ok(start) => Ok(Some(start)),
        Err(Errno::NXIO) => Ok(None),
        // A file system that cannot tell: all of it, once.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok((from == 0).then_some(0)),
        Err(errno) => Err(errno.into()),
    }
}

/// Gives the copy the owner, mode and times of the original. The owner first: a change of it takes the set-uid bit away.
fn take_after(dir: impl AsFd, name: &CStr, stat: &Stat) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    match chownat(&dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW) {
        // A file system without owners.
        Ok(()) | Err(Errno::PERM | Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(errno),
    }
    // What `name` is was decided by us, and only root can reach into the workshop: it is no link that chmod would follow.
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        chmodat(&dir, name, Mode::from_raw_mode(stat.st_mode as RawMode & 0o7777), AtFlags::empty())?;
    }
    let times = Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime as _, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: stat.st_mtime as _, tv_nsec: stat.st_mtime_nsec as _ },
    };
    utimensat(dir, name, &times, AtFlags::SYMLINK_NOFOLLOW)
}

/// Copies the extended attributes that the file system takes. After owner and mode, whose change takes capabilities away and
/// changes access lists.
fn copy_xattrs(from: impl AsFd, to: impl AsFd) {
    let mut names = Vec::with_capacity(MAX_XATTR);
    if flistxattr(&from, rustix::buffer::spare_capacity(&mut names)).is_err() || names.is_empty() {
        return;
    }
    for name in names.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let mut value = Vec::with_capacity(MAX_XATTR);
        if fgetxattr(&from, name, rustix::buffer::spare_capacity(&mut value)).is_ok() {
            let _ = fsetxattr(&to, name, &value, XattrFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::makedev;
    use std::io::{Seek, Write};
    use std::os::unix::fs::{chown, symlink, FileTypeExt, MetadataExt, PermissionsExt};
    use std::time::Duration;

    fn source() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join("s").join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/f"), "content").unwrap();
        fs::hard_link(at("a/f"), at("a/b/linked")).unwrap();
        symlink("../nowhere", at("a/link")).unwrap();
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        fs::set_permissions(at("a/f"), fs::Permissions::from_mode(0o4751)).unwrap();
        fs::set_permissions(at("a/b"), fs::Permissions::from_mode(0o1550)).unwrap();
        for name in ["a/f", "a/b", "a"] {
            File::open(at(name)).unwrap().set_modified(UNIX_EPOCH + Duration::new(1000, 5)).unwrap();
        }
        dir
    }

    #[test]
    fn everything_arrives_as_it_was_and_is_gone_where_it_was() {
        let (from, to) = (source(), tempfile::tempdir().unwrap());
        let at = |name: &str| to.path().join("d").join(name);
        let root = nix::unistd::geteuid().is_root();
        if root {
            let owned = from.path().join("s/a/f");
            chown(&owned, Some(123), Some(456)).unwrap();
            // As a change of the owner takes it away.
            fs::set_permissions(&owned, fs::Permissions::from_mode(0o4751)).unwrap();
            mknodat(CWD, from.path().join("s/null"), FileType::CharacterDevice, Mode::RWXU, makedev(1, 3)).unwrap();
        }
        transfer(&from.path().join("s"), &at("")).unwrap();
        assert_eq!(fs::read_dir(from.path()).unwrap().count(), 0);
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 1);
        assert_eq!(fs::read(at("a/b/linked")).unwrap(), b"content");
        let (file, linked) = (fs::metadata(at("a/f")).unwrap(), fs::metadata(at("a/b/linked")).unwrap());
        assert_eq!((file.ino(), file.nlink(), file.mode() & 0o7777), (linked.ino(), 2, 0o4751));
        assert_eq!(fs::metadata(at("a/b")).unwrap().mode() & 0o7777, 0o1550);
        assert_eq!(fs::read_link(at("a/link")).unwrap(), Path::new("../nowhere"));
        assert!(fs::metadata(at("fifo")).unwrap().file_type().is_fifo());
        for name in ["a/f", "a/b", "a"] {
            let metadata = fs::metadata(at(name)).unwrap();
            assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1000, 5), "{name}");
        }
        if root {
            assert_eq!((file.uid(), file.gid()), (123, 456));
            assert_eq!(fs::metadata(at("null")).unwrap().rdev(), makedev(1, 3));
        }
    }

    #[test]
    fn holes_stay_holes_and_attributes_stay() {
        let (from, to) = (tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap(), tempfile::tempdir().unwrap());
        let (source, destination) = (from.path().join("s"), to.path().join("d"));
        let mut file = File::create(&source).unwrap();
        for offset in [10_000_000, 20_000_000] {
            file.seek(io::SeekFrom::Start(offset)).unwrap();
            file.write_all(b"data").unwrap();
        }
        file.set_len(1 << 40).unwrap();
        fsetxattr(&file, "user.e2b.key", b"value", XattrFlags::empty()).unwrap();
        transfer(&source, &destination).unwrap();
        let copy = fs::metadata(&destination).unwrap();
        assert_eq!(copy.len(), 1 << 40);
        assert!(copy.blocks() < 1000, "{}", copy.blocks());
        let mut content = [0; 4];
        let mut file = File::open(&destination).unwrap();
        file.seek(io::SeekFrom::Start(20_000_000)).unwrap();
        file.read_exact(&mut content).unwrap();
        assert_eq!(&content, b"data");
        let kept = super::super::metadata::read(&destination);
        // Where the temporary directory can keep attributes at all.
        if fsetxattr(&file, "user.probe", b"", XattrFlags::empty()).is_ok() {
            assert_eq!(kept.get("key").map(String::as_str), Some("value"));
        }
    }

    #[test]
    fn what_fails_changes_nothing() {
        let (from, to) = (source(), tempfile::tempdir().unwrap());
        let source = from.path().join("s");
        fs::create_dir_all(to.path().join("full/x")).unwrap();
        fs::write(to.path().join("f"), "old").unwrap();
        let kind = |name: &str| transfer(&source, &to.path().join(name)).unwrap_err().kind;
        assert_eq!(kind("full"), FsErrorKind::FailedPrecondition);
        assert_eq!(kind("f"), FsErrorKind::InvalidArgument);
        assert_eq!(transfer(&source, &source.join("a/d")).unwrap_err().kind, FsErrorKind::FailedPrecondition);
        let mut deep = source.join("deep");
        deep.extend((0..MAX_DEPTH).map(|_| "d"));
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(kind("new"), FsErrorKind::FailedPrecondition);
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 2);
        assert_eq!(fs::read(to.path().join("f")).unwrap(), b"old");
        assert_eq!(fs::read(source.join("a/f")).unwrap(), b"content");
        assert_eq!(fs::read_dir(source.join("a")).unwrap().count(), 3);
    }
}
