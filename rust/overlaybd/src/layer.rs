//! One sealed layer.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use crate::lsmt::{read_index, Extent, Header, HeaderError, IndexError, Kind, LayerInfo, HEADER_SPACE};
use crate::sync::lock;
use crate::tar::{unwrap_tar, TarError};
use crate::zfile::{is_zfile, OpenZFileError, ZFile};
use crate::ByteSource;

/// Why a layer cannot be opened.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum OpenLayerError {
    /// the layer's tar archive cannot be used
    Tar(#[from] TarError),
    /// the compressed layer cannot be used
    ZFile(#[from] OpenZFileError),
    /// {0} bytes are too few for a sealed layer
    TooShort(u64),
    /// the layer's {0} cannot be used
    Header(&'static str, #[source] HeaderError),
    /// the layer's index cannot be used
    Index(#[from] IndexError),
    /// reading the layer failed
    Io(#[from] io::Error),
}

/// An immutable layer. Its index is read when a stack is made of it and then belongs to the stack.
pub struct Layer {
    source: Arc<dyn ByteSource>,
    info: LayerInfo,
    index_offset: u64,
    index_len: u64,
    /// Where the trailer starts, which the index must not reach.
    trailer: u64,
    /// What is left to do for a layer that was sealed in place.
    unsynced: Mutex<Option<Unsynced>>,
}

/// A layer sealed in place whose bytes may still be in the page cache only.
pub(crate) struct Unsynced {
    pub(crate) data: Arc<File>,
    /// The header that stops announcing a sparse upper, written once the trailer is on stable storage.
    pub(crate) header: Option<[u8; HEADER_SPACE as usize]>,
}

impl Layer {
    /// Opens a layer: plain LSMT, LSMT in a ZFile, or either inside the tar archive registries use.
    ///
    /// # Errors
    /// [`OpenLayerError`] if headers are damaged. The index is validated when it is read.
    pub fn open(source: Arc<dyn ByteSource>) -> Result<Self, OpenLayerError> {
        let mut source = unwrap_tar(source)?;
        if is_zfile(&*source)? {
            source = Arc::new(ZFile::open(source)?);
        }
        let size = source.size();
        if size < 2 * HEADER_SPACE {
            return Err(OpenLayerError::TooShort(size));
        }
        let header =
            Header::parse_header(&read_block(&*source, 0)?).map_err(|e| OpenLayerError::Header("header", e))?;
        if header.kind == Kind::IndexHeader {
            return Err(OpenLayerError::Header("header", HeaderError::Flags(1, "layer")));
        }
        let trailer = size - HEADER_SPACE;
        let block = read_block(&*source, trailer)?;
        let header = Header::parse_trailer(&block).map_err(|e| OpenLayerError::Header("trailer", e))?;
        Ok(Self {
            source,
            info: header.info,
            index_offset: header.index_offset,
            index_len: header.index_len,
            trailer,
            unsynced: Mutex::new(None),
        })
    }

    /// A layer that was just sealed in place.
    pub(crate) fn sealed(source: Arc<dyn ByteSource>, trailer: Header, unsynced: Unsynced) -> Self {
        Self {
            trailer: source.size() - HEADER_SPACE,
            source,
            info: trailer.info,
            index_offset: trailer.index_offset,
            index_len: trailer.index_len,
            unsynced: Mutex::new(Some(unsynced)),
        }
    }

    /// What the layer says about itself.
    pub fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// The bytes of the (decompressed) LSMT file.
    pub fn source(&self) -> &Arc<dyn ByteSource> {
        &self.source
    }

    /// Reads and validates the layer's index.
    ///
    /// # Errors
    /// [`OpenLayerError::Index`] or [`OpenLayerError::Io`].
    pub(crate) fn load_index(&self) -> Result<Vec<Extent>, OpenLayerError> {
        Ok(read_index(&*self.source, self.index_offset, self.index_len, self.trailer)?)
    }

    /// Whether the layer is known to be on stable storage; always true for one that was opened.
    pub fn is_durable(&self) -> bool {
        lock(&self.unsynced).is_none()
    }

    /// Brings a layer that was sealed in place to stable storage. After that the index log of the upper it
    /// was is no longer needed and may be deleted.
    ///
    /// # Errors
    /// The file system failed; the layer is still readable and the call may be repeated.
    pub fn sync(&self) -> io::Result<()> {
        let mut unsynced = lock(&self.unsynced);
        let Some(Unsynced { data, header }) = &*unsynced else { return Ok(()) };
        rustix::fs::fdatasync(data)?;
        if let Some(header) = header {
            data.write_all_at(header, 0)?;
            rustix::fs::fdatasync(data)?;
        }
        *unsynced = None;
        Ok(())
    }
}

fn read_block(source: &dyn ByteSource, offset: u64) -> io::Result<[u8; HEADER_SPACE as usize]> {
    let mut block = [0u8; HEADER_SPACE as usize];
    source.read_exact_at(&mut block, offset)?;
    Ok(block)
}
