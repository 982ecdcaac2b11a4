//! Creating and opening uppers.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, RwLock};

use crate::index::{replay_into, ExtentMap};
use crate::layer::Layer;
use crate::lsmt::{Extent, Header, HeaderError, Kind, LayerInfo, HEADER_SPACE, SECTOR};
use crate::source::FileSource;
use crate::upper::log::{IndexLog, LogError};
use crate::upper::{sparse, Mode, State, Upper};

/// Why an upper cannot be made.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum CreateUpperError {
    /// virtual size {0} is not a positive multiple of {1} bytes
    Size(u64, u64),
    /// the upper's description does not fit the format
    Header(#[from] HeaderError),
    /// the file system does not tell holes from data in units of 4096 bytes, as a sparse upper needs
    Sparse,
    /// creating the upper failed
    Io(#[from] io::Error),
}

/// Why an upper cannot be opened.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum OpenUpperError {
    /// the upper's {0} file is too short for a header
    TooShort(&'static str),
    /// the header of the upper's {0} file cannot be used
    Header(&'static str, #[source] HeaderError),
    /// the upper's {0} file is of another kind
    Kind(&'static str),
    /// the data file and the index log belong to different uppers
    Mismatch,
    /// an append-only upper needs its index log
    NoLog,
    /// the upper is already sealed and on stable storage: open it as a layer
    Sealed,
    /// virtual size {0} is not a positive multiple of {1} bytes
    Size(u64, u64),
    /// the sparse upper is in too many pieces
    Pieces,
    /// the index log cannot be used
    Log(#[from] LogError),
    /// opening the upper failed
    Io(#[from] io::Error),
}

impl Upper {
    /// Makes an append-only upper of two empty files that are open for reading and writing.
    ///
    /// # Errors
    /// [`CreateUpperError`].
    pub fn create(data: File, index: File, info: LayerInfo) -> Result<Self, CreateUpperError> {
        check_size(&info, SECTOR).map_err(|(size, unit)| CreateUpperError::Size(size, unit))?;
        let kind = Kind::DataHeader { sealed: false, sparse: false };
        let mut header = Header { kind, index_offset: 0, index_len: 0, info };
        data.write_all_at(&header.to_block()?, 0)?;
        header.kind = Kind::IndexHeader;
        header.index_offset = HEADER_SPACE;
        index.write_all_at(&header.to_block()?, 0)?;
        let log = IndexLog::new(index);
        let mode = Mode::append(HEADER_SPACE, log);
        Ok(Self::new(data.into(), header.info, mode, ExtentMap::default())?)
    }

    /// Makes a sparse upper of one empty file that is open for reading and writing.
    ///
    /// # Errors
    /// [`CreateUpperError`].
    pub fn create_sparse(data: File, info: LayerInfo) -> Result<Self, CreateUpperError> {
        check_size(&info, sparse::GRANULE).map_err(|(size, unit)| CreateUpperError::Size(size, unit))?;
        data.set_len(HEADER_SPACE + info.virtual_size.max(3 * sparse::GRANULE))?;
        if !sparse::tells_holes(&data, HEADER_SPACE)? {
            return Err(CreateUpperError::Sparse);
        }
        data.set_len(HEADER_SPACE + info.virtual_size)?;
        let kind = Kind::DataHeader { sealed: false, sparse: true };
        let header = Header { kind, index_offset: 0, index_len: 0, info };
        data.write_all_at(&header.to_block()?, 0)?;
        Ok(Self::new(data.into(), header.info, Mode::Sparse, ExtentMap::default())?)
    }

    /// Opens an upper after a clean or any other end: everything that was flushed is there. Which of the two kinds it is
    /// stands in the data file; an append-only one needs its index log.
    ///
    /// An upper that was being sealed, or was sealed but never synced, is opened as the upper it was.
    ///
    /// # Errors
    /// [`OpenUpperError`].
    pub fn open(data: File, index: Option<File>) -> Result<Self, OpenUpperError> {
        let header = read_header(&data, "data")?;
        let info = header.info;
        match header.kind {
            Kind::DataHeader { sealed: false, sparse: true } => {
                check_size(&info, sparse::GRANULE).map_err(|(size, unit)| OpenUpperError::Size(size, unit))?;
                let extents = sparse::scan(&data, info.virtual_size)?.ok_or(OpenUpperError::Pieces)?;
                // Cuts off what an unfinished seal left behind.
                data.set_len(HEADER_SPACE + info.virtual_size)?;
                Ok(Self::new(data.into(), info, Mode::Sparse, ExtentMap::from_sorted(extents))?)
            }
            Kind::DataHeader { sealed: false, sparse: false } => {
                check_size(&info, SECTOR).map_err(|(size, unit)| OpenUpperError::Size(size, unit))?;
                let Some(index) = index else {
                    let sealed = Layer::open(Arc::new(FileSource::new(data)?)).is_ok();
                    return Err(if sealed { OpenUpperError::Sealed } else { OpenUpperError::NoLog });
                };
                let index_header = read_header(&index, "index")?;
                if index_header.kind != Kind::IndexHeader || index_header.index_offset != HEADER_SPACE {
                    return Err(OpenUpperError::Kind("index"));
                }
                if index_header.info.uuid != info.uuid {
                    return Err(OpenUpperError::Mismatch);
                }
                let size = data.metadata()?.len();
                let mut replay = Replay::default();
                let log = IndexLog::open(index, size / SECTOR, |entry| replay.play(entry))?;
                let mode = Mode::append(size.next_multiple_of(SECTOR), log);
                Ok(Self::new(data.into(), info, mode, replay.finish())?)
            }
            _ => Err(OpenUpperError::Kind("data")),
        }
    }

    fn new(data: Arc<File>, info: LayerInfo, mode: Mode, map: ExtentMap) -> io::Result<Self> {
        let source = FileSource::new(data.clone())?;
        let state = State { map, pending: Vec::new() };
        Ok(Self { data, source, info, mode, gate: RwLock::new(false), state: RwLock::new(state) })
    }
}

/// The index that a log leaves.
#[derive(Default)]
struct Replay {
    /// While each entry comes behind all others, as those of sequential writes and of compacted logs do: their index.
    map: ExtentMap,
    /// All entries, once that has ended.
    log: Vec<Extent>,
}

impl Replay {
    fn play(&mut self, entry: Extent) {
        if self.log.is_empty() {
            if self.map.append(entry) {
                return;
            }
            self.log = std::mem::take(&mut self.map).to_vec();
        }
        self.log.push(entry);
    }

    fn finish(self) -> ExtentMap {
        match self.log.is_empty() {
            true => self.map,
            false => replay_into(self.log, |index| ExtentMap::from_sorted(index)),
        }
    }
}

fn check_size(info: &LayerInfo, unit: u64) -> Result<(), (u64, u64)> {
    match info.virtual_size {
        size if size > 0 && size % unit == 0 => Ok(()),
        size => Err((size, unit)),
    }
}

fn read_header(file: &File, which: &'static str) -> Result<Header, OpenUpperError> {
    let mut block = [0u8; HEADER_SPACE as usize];
    file.read_exact_at(&mut block, 0).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => OpenUpperError::TooShort(which),
        _ => OpenUpperError::Io(error),
    })?;
    Header::parse_header(&block).map_err(|error| OpenUpperError::Header(which, error))
}
