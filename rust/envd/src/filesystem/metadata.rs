//! User metadata of files: `X-Metadata-<key>: value` headers of an upload, kept as extended attributes `user.e2b.<key>`.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;

use hyper::header::HeaderMap;
use rustix::fs::{flistxattr, fremovexattr, fsetxattr, getxattr, listxattr, XattrFlags};
use rustix::io::Errno;

use super::error::{FsError, FsErrorKind};

const HEADER_PREFIX: &str = "x-metadata-";
const XATTR_PREFIX: &str = "user.e2b.";
/// The kernel's limit of 255 bytes for the name of an attribute, less the prefix.
pub const MAX_KEY_BYTES: usize = 255 - XATTR_PREFIX.len();
/// Keys and values of one file together; what ext4 can keep in one block (protocol §3.5).
pub const MAX_TOTAL_BYTES: usize = 4096;
/// Longest list of attribute names the kernel returns (XATTR_LIST_MAX).
const MAX_LIST_BYTES: usize = 65_536;

/// Metadata of one file, by lower-cased key.
pub type UserMetadata = BTreeMap<String, String>;

/// The metadata an upload asks for. Header names are lower-case already.
///
/// # Errors
/// `invalid_argument` when a key is empty, too long or given twice, a value is not printable ASCII, or all are too long together.
pub fn from_headers(headers: &HeaderMap) -> Result<UserMetadata, FsError> {
    let mut metadata = UserMetadata::new();
    let mut total = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else { continue };
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(FsError::invalid(format!(
                "metadata key '{key}' has {} bytes, allowed are 1 to {MAX_KEY_BYTES}",
                key.len()
            )));
        }
        let bytes = value.as_bytes();
        if !bytes.iter().all(|byte| matches!(byte, b' '..=b'~')) {
            return Err(FsError::invalid(format!("metadata value of '{key}' is not printable ASCII; encode it")));
        }
        total += key.len() + bytes.len();
        if total > MAX_TOTAL_BYTES {
            return Err(FsError::invalid(format!(
                "metadata exceed {MAX_TOTAL_BYTES} bytes (keys and values together) at key '{key}'"
            )));
        }
        if metadata.insert(key.to_owned(), String::from_utf8_lossy(bytes).into_owned()).is_some() {
            return Err(FsError::invalid(format!("metadata key '{key}' is given more than once")));
        }
    }
    Ok(metadata)
}

/// The metadata of the file `path` leads to. What cannot be read counts as absent: metadata decorate an entry, and must not
/// make it unlistable. Blocks.
pub fn read(path: &Path) -> UserMetadata {
    let mut list = Vec::with_capacity(1024);
    match listxattr(path, rustix::buffer::spare_capacity(&mut list)) {
        Ok(_) => {}
        Err(Errno::RANGE) => {
            list.reserve(MAX_LIST_BYTES);
            if listxattr(path, rustix::buffer::spare_capacity(&mut list)).is_err() {
                return UserMetadata::new();
            }
        }
        Err(_) => return UserMetadata::new(),
    }
    let read_value = |key: String| {
        let mut value = Vec::with_capacity(MAX_TOTAL_BYTES);
        getxattr(path, format!("{XATTR_PREFIX}{key}"), rustix::buffer::spare_capacity(&mut value)).ok()?;
        Some((key, String::from_utf8_lossy(&value).into_owned()))
    };
    keys(&list).filter_map(read_value).collect()
}

/// Makes `metadata` the whole metadata of an open file. Blocks.
///
/// # Errors
/// `invalid_argument` when the file system keeps no attributes (and there are some to keep), `no space` when it has no room.
pub fn replace(file: impl AsFd, path: &Path, metadata: &UserMetadata) -> Result<(), FsError> {
    let mut list = Vec::with_capacity(MAX_LIST_BYTES);
    // A file system without attributes has none to clear.
    if flistxattr(&file, rustix::buffer::spare_capacity(&mut list)).is_ok() {
        for key in keys(&list).filter(|key| !metadata.contains_key(key)) {
            match fremovexattr(&file, format!("{XATTR_PREFIX}{key}")) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(FsError::errno("clear metadata of", path, errno)),
            }
        }
    }
    for (key, value) in metadata {
        fsetxattr(&file, format!("{XATTR_PREFIX}{key}"), value.as_bytes(), XattrFlags::empty()).map_err(|errno| {
            match errno {
                Errno::OPNOTSUPP => FsError::invalid(format!(
                    "the file system of '{}' keeps no metadata; upload without X-Metadata headers",
                    path.display()
                )),
                Errno::NOSPC | Errno::TOOBIG | Errno::RANGE => FsError::new(
                    FsErrorKind::NoSpace,
                    format!("no space left for metadata '{key}' of '{}'", path.display()),
                ),
                _ => FsError::errno("set metadata of", path, errno),
            }
        })?;
    }
    Ok(())
}

/// The keys of ours in a NUL-separated list of attribute names.
fn keys(list: &[u8]) -> impl Iterator<Item = String> + '_ {
    list.split(|&byte| byte == 0)
        .filter_map(|name| name.strip_prefix(XATTR_PREFIX.as_bytes()))
        .filter_map(|key| std::str::from_utf8(key).ok())
        .filter(|key| !key.is_empty())
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(HeaderName::try_from(*name).unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        map
    }

    #[test]
    fn keys_are_lower_case_and_other_headers_are_ignored() {
        let metadata = from_headers(&headers(&[("X-Metadata-Author", "Ann B."), ("X-Other", "é")])).unwrap();
        assert_eq!(metadata, UserMetadata::from([("author".into(), "Ann B.".into())]));
    }

    #[test]
    fn limits() {
        let key = |n: usize| format!("x-metadata-{}", "k".repeat(n));
        assert!(from_headers(&headers(&[(&key(MAX_KEY_BYTES), "v")])).is_ok());
        assert!(from_headers(&headers(&[(&key(MAX_KEY_BYTES + 1), "v")])).is_err());
        assert!(from_headers(&headers(&[("x-metadata-", "v")])).is_err());
        assert!(from_headers(&headers(&[("x-metadata-a", "é")])).is_err());
        assert!(from_headers(&headers(&[("x-metadata-a", "1"), ("x-metadata-a", "2")])).is_err());
        assert!(from_headers(&headers(&[("x-metadata-a", &"v".repeat(MAX_TOTAL_BYTES - 1))])).is_ok());
        assert!(from_headers(&headers(&[("x-metadata-a", &"v".repeat(MAX_TOTAL_BYTES))])).is_err());
    }

    #[test]
    fn each_upload_replaces_the_whole_set() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let first = UserMetadata::from([("a".into(), "1".into()), ("b".into(), "2".into())]);
        replace(file.as_file(), file.path(), &first).unwrap();
        assert_eq!(read(file.path()), first);
        let second = UserMetadata::from([("b".into(), "3".into())]);
        replace(file.as_file(), file.path(), &second).unwrap();
        assert_eq!(read(file.path()), second);
        replace(file.as_file(), file.path(), &UserMetadata::new()).unwrap();
        assert_eq!(read(file.path()), UserMetadata::new());
    }
}
