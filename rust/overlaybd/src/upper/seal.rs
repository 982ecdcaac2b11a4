//! Turning an upper into a layer, in place.

use std::fs::File;
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
        let trailer_block = trailer.to_block()?;
        let written = self.data.set_len(index_offset).and_then(|()| {
            let end = write_index(&self.data, &extents, index_offset)?;
            self.data.write_all_at(&trailer_block, end)
        });
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

/// Writes extents and padding up to a whole sector; gives where they end. A few kilobytes at a time, which the processor's cache
/// holds: all at once would be as much fresh memory as the extents themselves.
fn write_index(file: &File, extents: &[Extent], mut at: u64) -> io::Result<u64> {
    const STEP: usize = (64 << 10) / Extent::SIZE;
    let mut bytes = Vec::with_capacity(extents.len().min(STEP) * Extent::SIZE + SECTOR as usize);
    let padding = padding(extents.len(), SECTOR as usize);
    let mut steps = extents.chunks(STEP).peekable();
    while let Some(step) = steps.next() {
        bytes.clear();
        step.iter().for_each(|extent| bytes.extend_from_slice(&extent.to_bytes()));
        let padding = if steps.peek().is_none() { padding } else { 0 };
        (0..padding).for_each(|_| bytes.extend_from_slice(&Extent::PADDING.to_bytes()));
        file.write_all_at(&bytes, at)?;
        at += bytes.len() as u64;
    }
    Ok(at)
}
