//! A layer as `attach` describes it, and what it becomes.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use overlaybd::{ByteSource, Digest, FileSource};

use super::layer::CachedLayer;
use crate::origin::{Credentials, Headers, NoCredentials};

/// A layer behind a URL.
#[derive(Clone)]
pub struct RemoteLayer {
    /// HTTP or HTTPS, no credentials in it.
    pub url: String,
    /// Sent with every request to the URL's own scheme, host and port.
    pub headers: Headers,
    /// Bytes of the layer.
    pub size: u64,
    /// SHA-256 of the layer.
    pub digest: Option<Digest>,
    /// A local file: read instead if it is there and has the right size, else made when the layer is complete.
    pub path: Option<PathBuf>,
    /// Who renews the headers.
    pub credentials: Arc<dyn Credentials>,
}

impl RemoteLayer {
    /// A layer without headers, digest and path.
    pub fn new(url: impl Into<String>, size: u64) -> Self {
        let url = url.into();
        Self { url, headers: Headers::default(), size, digest: None, path: None, credentials: Arc::new(NoCredentials) }
    }

    /// Reads a digest as manifests write it: `sha256:` and 64 hexadecimal digits; the prefix may be missing.
    pub fn parse_digest(text: &str) -> Option<Digest> {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        let mut digest = [0; 32];
        if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        for (index, byte) in digest.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * index..2 * index + 2)?, 16).ok()?;
        }
        Some(Digest(digest))
    }
}

/// Where an open layer is read: its local file, or its origin through the cache.
#[derive(Clone)]
pub enum LayerSource {
    /// Complete and local.
    Local(Arc<FileSource>),
    /// Remote, at least for now.
    Cached(Arc<CachedLayer>),
}

impl LayerSource {
    /// The local file of `layer`, if it is there and complete.
    pub(super) fn local(layer: &RemoteLayer) -> Option<Self> {
        let path = layer.path.as_deref()?;
        let source = File::open(path).and_then(FileSource::new).ok()?;
        if source.size() != layer.size {
            tracing::warn!(
                ?path,
                found = source.size(),
                declared = layer.size,
                "a local layer has the wrong size and is not used"
            );
            return None;
        }
        Some(Self::Local(Arc::new(source)))
    }

    /// The remote layer, if it is one.
    pub fn cached(&self) -> Option<&Arc<CachedLayer>> {
        match self {
            Self::Local(_) => None,
            Self::Cached(layer) => Some(layer),
        }
    }

    fn source(&self) -> &dyn ByteSource {
        match self {
            Self::Local(source) => source,
            Self::Cached(layer) => layer,
        }
    }
}

impl ByteSource for LayerSource {
    fn size(&self) -> u64 {
        self.source().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.source().read_exact_at(buf, offset)
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.source().prefetch(offset, len)
    }

    fn as_file(&self) -> Option<&File> {
        self.source().as_file()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_as_written() {
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(RemoteLayer::parse_digest(hex).unwrap().to_string(), hex);
        assert_eq!(RemoteLayer::parse_digest(&format!("sha256:{hex}")).unwrap().to_string(), hex);
        for wrong in ["", "sha256:", "sha512:00", &hex[1..], &format!("+{}", &hex[1..]), &"é".repeat(32)] {
            assert!(RemoteLayer::parse_digest(wrong).is_none(), "{wrong}");
        }
    }
}
