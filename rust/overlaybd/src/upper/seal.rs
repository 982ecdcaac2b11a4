//! Turning an upper into a layer, in place.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use crate::layer::{Layer, Unsynced};
use crate::lsmt::{padding, Extent, Header, HeaderError, Kind, HEADER_SPACE, SECTOR};
use crate::source::FileSource;
use crate::stack::StackError;
use crate::sync::{lock, read, write};
use crate::upper::{Mode, Upper};

/// Why an upper cannot be sealed.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum SealError {
    /// the image has no writable upper
    ReadOnly,
    /// the upper was sealed before
    Sealed,
    /// the next upper has {next} bytes, the image {size}
    Size {
        /// Virtual size of the upper that should take over.
        next: u64,
        /// Virtual size of the image.
        size: u64,
    },
    /// the next upper was not made on top of the one to seal
    Parent,
    /// the sealed layer cannot be stacked
    Stack(#[from] StackError),
    /// the layer's description does not fit the format
    Header(#[from] HeaderError),
    /// writing the index failed
    Io(#[from] io::Error),
}

impl Upper {
    /// Writes the index and the trailer behind the data, and gives the layer with its index.
    ///
    /// Nothing is waited for to reach the disk. Until [`Layer::sync`] has done so, the index log (or, in a sparse
    /// upper, the file system's map) is still complete, and [`Upper::open`] brings back the upper.
    ///
    /// # Errors
    /// [`SealError`]; the upper is then as before and takes writes.
    pub fn seal(&self) -> Result<(Layer, Vec<Extent>), SealError> {
        // Waits for the writes under way.
        let mut sealed = write(&self.gate);
        if *sealed {
            return Err(SealError::Sealed);
        }
        let extents = read(&self.state).map.to_vec();
        let index_offset = match &self.mode {
            Mode::Append { tail, log, .. } => {
                let mut log = lock(log);
                let pending = std::mem::take(&mut write(&self.state).pending);
                if let Err(error) = log.append(&pending) {
                    self.put_back(pending);
                    return Err(error.into());
                }
                tail.load(Ordering::Relaxed)
            }
            Mode::Sparse => (HEADER_SPACE + self.info.virtual_size).next_multiple_of(SECTOR),
        };
        let kind = Kind::Trailer;
        let trailer = Header { kind, index_offset, index_len: extents.len() as u64, info: self.info.clone() };
        let mut bytes = Vec::with_capacity((extents.len() + 32) * Extent::SIZE + HEADER_SPACE as usize);
        let padding = padding(extents.len(), SECTOR as usize);
        for extent in extents.iter().chain(std::iter::repeat_n(&Extent::PADDING, padding)) {
            bytes.extend_from_slice(&extent.to_bytes());
        }
        bytes.extend_from_slice(&trailer.to_block()?);
        let written = self.data.set_len(index_offset).and_then(|()| self.data.write_all_at(&bytes, index_offset));
        if let Err(error) = written {
            // Best effort: what is left behind the data is never referred to.
            let _ = self.data.set_len(index_offset);
            return Err(error.into());
        }
        let header = match self.mode {
            Mode::Append { .. } => None,
            Mode::Sparse => {
                let kind = Kind::DataHeader { sealed: false, sparse: false };
                Some(Header { kind, index_offset: 0, index_len: 0, info: self.info.clone() }.to_block()?)
            }
        };
        let source = Arc::new(FileSource::new(self.data.clone())?);
        let layer = Layer::sealed(source, trailer, Unsynced { data: self.data.clone(), header });
        *sealed = true;
        Ok((layer, extents))
    }
}
