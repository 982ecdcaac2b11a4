//! `EntryInfo`: what the protocol says about one file (§3.4, Appendix B).

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use serde::Serialize;

use super::error::FsError;
use super::metadata;
use super::time::rfc3339;
use crate::users::UserDb;

/// `filesystem.FileType`. Devices, FIFOs, sockets and links that lead nowhere are unspecified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum FileType {
    /// None of the others.
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Unspecified,
    /// Regular file.
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    /// Directory.
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
}

impl FileType {
    fn of(metadata: &Metadata) -> Self {
        if metadata.is_file() {
            Self::File
        } else if metadata.is_dir() {
            Self::Directory
        } else {
            Self::Unspecified
        }
    }
}

/// `filesystem.EntryInfo` in proto3 JSON: 64-bit numbers are strings, default values are left out where a reader fills them in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last component of the path. Bytes that are not UTF-8 become U+FFFD, here and in every other text.
    pub name: String,
    /// Of the target, for a symlink.
    pub r#type: FileType,
    /// As requested, not resolved.
    pub path: String,
    /// Bytes, in decimal. Of the link itself, for a symlink.
    pub size: String,
    /// The nine permission bits. Of the target, for a symlink.
    pub mode: u32,
    /// Go style, see [`permissions`]. Of the link itself, for a symlink.
    pub permissions: String,
    /// User name, or the number when it has none.
    pub owner: String,
    /// Group name, or the number when it has none.
    pub group: String,
    /// RFC 3339, UTC.
    pub modified_time: String,
    /// For a symlink: where it finally leads; the link's own path when it leads nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// User metadata, see [`metadata`].
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Whether the path itself is a symlink.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
}

/// Describes `path` without following it. Blocks.
///
/// # Errors
/// `not_found` when it does not exist or a component of it is no directory; what the kernel answered otherwise.
pub fn stat(path: &Path, users: &UserDb) -> Result<EntryInfo, FsError> {
    let link = fs::symlink_metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotADirectory => FsError::not_found(path),
        _ => FsError::io("stat", path, &error),
    })?;
    Ok(describe(path, &link, users))
}

/// As [`stat`], for a path whose own metadata are at hand.
pub fn describe(path: &Path, link: &Metadata, users: &UserDb) -> EntryInfo {
    let own_path = path.to_string_lossy().into_owned();
    let is_symlink = link.is_symlink();
    let (target, symlink_target) = if is_symlink {
        match (fs::metadata(path), fs::canonicalize(path)) {
            (Ok(target), Ok(resolved)) => (Some(target), Some(resolved.to_string_lossy().into_owned())),
            _ => (None, Some(own_path.clone())),
        }
    } else {
        (None, None)
    };
    let shown = target.as_ref().unwrap_or(link);
    EntryInfo {
        name: path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        r#type: FileType::of(shown),
        path: own_path,
        size: link.len().to_string(),
        mode: shown.mode() & 0o777,
        permissions: permissions(link),
        owner: users.user_name(link.uid()),
        group: users.group_name(link.gid()),
        modified_time: rfc3339(link.mtime(), link.mtime_nsec()),
        symlink_target,
        // Only regular files and directories can have user attributes (xattr(7)).
        metadata: match FileType::of(shown) {
            FileType::Unspecified => BTreeMap::new(),
            FileType::File | FileType::Directory => metadata::read(path),
        },
        is_symlink,
    }
}

/// The text of Go's `fs.FileMode`: a letter for each of d L D p S u g c t that applies, in that order, or `-` when none does;
/// then `rwxrwxrwx`. The SDKs document this format.
pub fn permissions(metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let mode = metadata.mode();
    let device = kind.is_block_device() || kind.is_char_device();
    let letters = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (device, 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & 0o1000 != 0, 't'),
    ];
    let mut text: String = letters.iter().filter(|(applies, _)| *applies).map(|(_, letter)| letter).collect();
    if text.is_empty() {
        text.push('-');
    }
    text.extend("rwxrwxrwx".chars().enumerate().map(|(i, c)| if mode & (0o400 >> i) != 0 { c } else { '-' }));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn users() -> UserDb {
        UserDb::parse("root:x:0:0::/root:/bin/sh\n", "root:x:0:\n")
    }

    #[test]
    fn describes_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "abc").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let entry = stat(&path, &users()).unwrap();
        assert_eq!((entry.name.as_str(), entry.r#type, entry.size.as_str()), ("f", FileType::File, "3"));
        assert_eq!((entry.mode, entry.permissions.as_str()), (0o640, "-rw-r-----"));
        assert_eq!((entry.is_symlink, entry.symlink_target), (false, None));
    }

    #[test]
    fn a_symlink_shows_the_type_of_its_target_and_its_own_permissions() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link, far) = (dir.path().join("d"), dir.path().join("l"), dir.path().join("far"));
        fs::create_dir(&target).unwrap();
        fs::set_permissions(&target, fs::Permissions::from_mode(0o750)).unwrap();
        symlink("d", &link).unwrap();
        symlink("l", &far).unwrap();
        let entry = stat(&far, &users()).unwrap();
        assert_eq!((entry.r#type, entry.mode), (FileType::Directory, 0o750));
        assert_eq!(entry.permissions, "Lrwxrwxrwx");
        let resolved = fs::canonicalize(&target).unwrap();
        assert_eq!(entry.symlink_target.as_deref(), resolved.to_str());
        assert!(entry.is_symlink);
    }

    #[test]
    fn links_that_lead_nowhere_point_at_themselves() {
        let dir = tempfile::tempdir().unwrap();
        for (name, target) in [("broken", "gone"), ("cyclic", "cyclic")] {
            let link = dir.path().join(name);
            symlink(target, &link).unwrap();
            let entry = stat(&link, &users()).unwrap();
            assert_eq!(entry.r#type, FileType::Unspecified, "{name}");
            assert_eq!(entry.symlink_target.as_deref(), link.to_str());
            assert!(entry.is_symlink);
        }
    }

    #[test]
    fn permissions_are_written_as_go_does() {
        let of = |path: &str| permissions(&fs::symlink_metadata(path).unwrap());
        assert_eq!(of("/dev/null"), "Dcrw-rw-rw-");
        let dir = tempfile::tempdir().unwrap();
        let chmod = |mode| {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
            of(dir.path().to_str().unwrap())
        };
        assert_eq!(chmod(0o1777), "dtrwxrwxrwx");
        assert_eq!(chmod(0o6755), "dugrwxr-xr-x");
    }

    #[test]
    fn missing_paths_are_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "").unwrap();
        for path in [dir.path().join("gone"), file.join("below")] {
            assert_eq!(stat(&path, &users()).unwrap_err(), FsError::not_found(&path));
        }
    }

    #[test]
    fn wire_form_is_proto3_json() {
        let entry = EntryInfo {
            name: "f".into(),
            r#type: FileType::File,
            path: "/f".into(),
            size: "3".into(),
            mode: 420,
            permissions: "-rw-r--r--".into(),
            owner: "u".into(),
            group: "g".into(),
            modified_time: "2024-01-01T00:00:00Z".into(),
            symlink_target: None,
            metadata: BTreeMap::new(),
            is_symlink: false,
        };
        let expected = r#"{"name":"f","type":"FILE_TYPE_FILE","path":"/f","size":"3","mode":420,"permissions":"-rw-r--r--","owner":"u","group":"g","modifiedTime":"2024-01-01T00:00:00Z"}"#;
        assert_eq!(serde_json::to_string(&entry).unwrap(), expected);
    }
}
