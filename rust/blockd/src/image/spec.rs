//! What requests say about layers, uppers and outputs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overlaybd::zfile::{Algorithm, ZFileOptions};
use serde::{Deserialize, Serialize};

use crate::Error;

/// Longest name of an image.
const MAX_NAME: usize = 128;

/// A layer: a local file, or one behind HTTP(S) that a local file may complete.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// Local file. With a `url` it is preferred once it is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Where the layer's bytes are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Headers of each request to `url`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// Bytes behind `url`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// `sha256:` and 64 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl LayerSpec {
    /// A local file.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), url: None, headers: BTreeMap::new(), size: None, digest: None }
    }
}

/// Where the writable upper of an image is, or is to be made.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpperSpec {
    /// A directory that belongs to this upper alone; made if missing.
    pub dir: PathBuf,
    /// What kind to make if there is none yet.
    #[serde(default)]
    pub mode: UpperMode,
}

/// The kinds of upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpperMode {
    /// Append-only data with an index log.
    #[default]
    Log,
    /// One sparse file.
    Sparse,
}

/// Who may open the file of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Compression algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// LZ4.
    Lz4,
    /// Zstandard.
    Zstd,
}

/// How to compress a layer.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZFileSpec {
    /// Algorithm.
    pub algorithm: Codec,
    /// Bytes of a block: a power of two, 4096 to 65536.
    #[serde(default = "default_block_size")]
    pub block_size: u32,
}

fn default_block_size() -> u32 {
    ZFileOptions::default().block_size
}

impl From<ZFileSpec> for ZFileOptions {
    fn from(spec: ZFileSpec) -> Self {
        let algorithm = match spec.algorithm {
            Codec::Lz4 => Algorithm::Lz4,
            Codec::Zstd => Algorithm::Zstd,
        };
        Self { algorithm, block_size: spec.block_size, verify: true }
    }
}

/// Checks the name of an image, which becomes that of a file.
///
/// # Errors
/// [`crate::Code::Invalid`].
pub fn check_name(name: &str) -> Result<(), Error> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(allowed) || matches!(name, "." | "..") {
        let shown: String = name.chars().take(MAX_NAME).collect();
        return Err(Error::invalid(format!("image name {shown:?} must be 1 to {MAX_NAME} of a-z 0-9 . _ -")));
    }
    Ok(())
}

/// Checks that a path is absolute: the daemon's working directory means nothing to its clients.
///
/// # Errors
/// [`crate::Code::Invalid`].
pub fn check_path(path: &Path) -> Result<(), Error> {
    match path.is_absolute() {
        true => Ok(()),
        false => Err(Error::invalid(format!("path {} must be absolute", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_mount() {
        for name in ["a", "sbx-1.mem_0", "..a", &"x".repeat(128)] {
            check_name(name).expect(name);
        }
        for name in ["", ".", "..", "a/b", "A", "ü", "a\0", &"x".repeat(129)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }
}
