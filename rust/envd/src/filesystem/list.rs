//! `ListDir`: entries of a directory, to a depth.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use super::entry::{describe, EntryInfo};
use super::error::{FsError, FsErrorKind};
use crate::users::UserDb;

/// Calls `emit` for every entry below `path`, `depth` levels deep (0 means 1): each directory before what is in it, names in
/// byte order. `path` may be a symlink and stays the prefix of every entry's path; symlinks below it are not followed. Entries
/// that vanish meanwhile and the insides of subdirectories that are closed even to root (other users' FUSE mounts) are left out. Blocks.
///
/// # Errors
/// `not_found`; `invalid_argument` for what is no directory and for a tree deeper than a path can name; `failed_precondition`
/// for a symlink loop; `permission_denied` when `path` itself may not be read; what `emit` returns.
pub fn list(
    path: &Path,
    depth: u32,
    users: &UserDb,
    mut emit: impl FnMut(&EntryInfo) -> Result<(), FsError>,
) -> Result<(), FsError> {
    require_directory(path)?;
    // Directories from `path` down to the one being listed, each with the names that are still to come. A list instead of
    // recursion, because a guest can nest directories deeper than a stack allows.
    let mut open = vec![(path.to_path_buf(), names(path)?.into_iter())];
    while let Some((dir, rest)) = open.last_mut() {
        let Some(name) = rest.next() else {
            open.pop();
            continue;
        };
        let entry = dir.join(name);
        let metadata = match fs::symlink_metadata(&entry) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(FsError::io("stat", &entry, &error)),
        };
        emit(&describe(&entry, &metadata, users))?;
        if metadata.is_dir() && open.len() < depth.max(1) as usize {
            match names(&entry) {
                Ok(names) => open.push((entry, names.into_iter())),
                // Vanished, replaced by something else, or closed.
                Err(error) if matches!(error.kind, FsErrorKind::NotFound | FsErrorKind::PermissionDenied) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Fails unless `path` leads to a directory.
///
/// # Errors
/// See [`list`].
pub fn require_directory(path: &Path) -> Result<(), FsError> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(FsError::invalid(format!("path '{}' is not a directory", path.display()))),
        Err(error) => Err(FsError::io("list", path, &error)),
    }
}

/// The names in a directory, in byte order.
fn names(dir: &Path) -> Result<Vec<OsString>, FsError> {
    let failed = |error: io::Error| FsError::io("list", dir, &error);
    let mut names = fs::read_dir(dir)
        .map_err(failed)?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(failed)?;
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    fn listed(path: &Path, depth: u32) -> Result<Vec<String>, FsError> {
        let mut paths = Vec::new();
        list(path, depth, &UserDb::default(), |entry| {
            paths.push(entry.path.strip_prefix(&format!("{}/", path.display())).unwrap().to_owned());
            Ok(())
        })?;
        Ok(paths)
    }

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("b/c/d")).unwrap();
        for file in ["a", "b/x", "b/c/y", "z"] {
            fs::write(dir.path().join(file), "").unwrap();
        }
        symlink("b", dir.path().join("link")).unwrap();
        dir
    }

    #[test]
    fn pre_order_to_the_depth_without_following_links() {
        let dir = tree();
        assert_eq!(listed(dir.path(), 0).unwrap(), ["a", "b", "link", "z"]);
        assert_eq!(listed(dir.path(), 1).unwrap(), ["a", "b", "link", "z"]);
        assert_eq!(listed(dir.path(), 2).unwrap(), ["a", "b", "b/c", "b/x", "link", "z"]);
        let all = ["a", "b", "b/c", "b/c/d", "b/c/y", "b/x", "link", "z"];
        assert_eq!(listed(dir.path(), u32::MAX).unwrap(), all);
    }

    #[test]
    fn a_symlinked_directory_keeps_the_requested_prefix() {
        let dir = tree();
        assert_eq!(listed(&dir.path().join("link"), 1).unwrap(), ["c", "x"]);
    }

    #[test]
    fn what_cannot_be_listed() {
        let dir = tree();
        symlink("loop", dir.path().join("loop")).unwrap();
        let kind = |name: &str| listed(&dir.path().join(name), 1).unwrap_err().kind;
        assert_eq!(kind("a"), FsErrorKind::InvalidArgument);
        assert_eq!(kind("gone"), FsErrorKind::NotFound);
        assert_eq!(kind("loop"), FsErrorKind::FailedPrecondition);
    }

    #[test]
    fn names_that_are_not_utf8_are_shown_lossily() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(OsStr::from_bytes(b"bad\xff")), "").unwrap();
        assert_eq!(listed(dir.path(), 1).unwrap(), ["bad\u{fffd}"]);
    }

    #[test]
    fn an_error_of_the_receiver_stops_the_walk() {
        let dir = tree();
        let mut seen = 0;
        let result = list(dir.path(), 9, &UserDb::default(), |_| {
            seen += 1;
            Err(FsError::invalid("enough"))
        });
        assert_eq!((seen, result), (1, Err(FsError::invalid("enough"))));
    }
}
