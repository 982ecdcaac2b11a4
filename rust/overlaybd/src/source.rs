//! Where a layer's bytes come from.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{fadvise, Advice};

/// Immutable bytes that can be read at any position from any thread.
///
/// A local file, a window of another source, a decompressing [`crate::zfile::ZFile`], or a remote cache.
pub trait ByteSource: Send + Sync {
    /// Length in bytes. It never changes while the source is open.
    fn size(&self) -> u64;

    /// Fills `buf` with the bytes that start at `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the range passes [`ByteSource::size`], `InvalidData` if a checksum or a compressed
    /// block is wrong, and whatever the origin reports.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Gets a range ready to be read soon: a remote source fetches it, of a file the kernel reads it ahead. Returns when it is
    /// there or on its way. What is beyond the end is left out.
    ///
    /// # Errors
    /// Whatever the origin reports.
    fn prefetch(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// The open file whose bytes these are, one to one, if there is one: a caller may then move bytes
    /// without copying them through this trait.
    fn as_file(&self) -> Option<&File> {
        None
    }
}

impl<S: ByteSource + ?Sized> ByteSource for Arc<S> {
    fn size(&self) -> u64 {
        (**self).size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        (**self).read_exact_at(buf, offset)
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        (**self).prefetch(offset, len)
    }

    fn as_file(&self) -> Option<&File> {
        (**self).as_file()
    }
}

/// A local file. Its length is taken once, when it is opened.
#[derive(Debug)]
pub struct FileSource {
    file: Arc<File>,
    size: u64,
}

impl FileSource {
    /// Takes an open file.
    ///
    /// # Errors
    /// Its length cannot be read.
    pub fn new(file: impl Into<Arc<File>>) -> io::Result<Self> {
        let file = file.into();
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }
}

impl ByteSource for FileSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        match NonZeroU64::new(len) {
            Some(len) => Ok(fadvise(&self.file, offset, Some(len), Advice::WillNeed)?),
            None => Ok(()),
        }
    }

    fn as_file(&self) -> Option<&File> {
        Some(&self.file)
    }
}

/// Bytes in memory.
#[derive(Debug, Clone)]
pub struct MemorySource(Arc<[u8]>);

impl MemorySource {
    /// Takes the bytes.
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self(bytes.into())
    }
}

impl ByteSource for MemorySource {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|start| self.0.get(start..start.checked_add(buf.len())?))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(bytes);
        Ok(())
    }
}

/// A range of another source.
pub struct Window {
    inner: Arc<dyn ByteSource>,
    start: u64,
    size: u64,
}

impl Window {
    /// The `size` bytes of `inner` from `start` on, or nothing if they are not all there.
    pub fn new(inner: Arc<dyn ByteSource>, start: u64, size: u64) -> Option<Self> {
        let end = start.checked_add(size)?;
        (end <= inner.size()).then_some(Self { inner, start, size })
    }
}

impl ByteSource for Window {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match offset.checked_add(buf.len() as u64) {
            Some(end) if end <= self.size => self.inner.read_exact_at(buf, self.start + offset),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.size.checked_sub(offset) {
            Some(left) => self.inner.prefetch(self.start + offset, len.min(left)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_shows_its_range_only() {
        let inner: Arc<dyn ByteSource> = Arc::new(MemorySource::new((0u8..100).collect::<Vec<_>>()));
        let window = Window::new(inner.clone(), 10, 20).expect("inside");
        let mut buf = [0u8; 4];
        window.read_exact_at(&mut buf, 16).expect("inside");
        assert_eq!(buf, [26, 27, 28, 29]);
        assert!(window.read_exact_at(&mut buf, 17).is_err());
        assert!(window.read_exact_at(&mut buf, u64::MAX).is_err());
        assert!(Window::new(inner.clone(), 90, 11).is_none());
        assert!(Window::new(inner, u64::MAX, 1).is_none());
    }
}
