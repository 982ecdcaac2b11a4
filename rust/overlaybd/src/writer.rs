//! Writing a new layer as a stream.

use std::io::{self, Write};

use crate::index::replay;
use crate::lsmt::{padding, Extent, Header, HeaderError, Kind, LayerInfo, HEADER_SPACE, SECTOR};

/// Block that the index is padded to, as overlaybd's `commit` does.
const INDEX_BLOCK: usize = 4096;

/// Why a layer cannot be written.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum WriteLayerError {
    /// the layer's description does not fit the format
    Header(#[from] HeaderError),
    /// a layer holds whole sectors: {len} bytes at {offset} are not
    Unaligned {
        /// Where they go.
        offset: u64,
        /// How many there are.
        len: u64,
    },
    /// {len} bytes at {offset} reach beyond what the format can address
    OutOfRange {
        /// Where they go.
        offset: u64,
        /// How many there are.
        len: u64,
    },
    /// writing the layer failed
    Io(#[from] io::Error),
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSummary {
    /// Bytes of the whole LSMT file, before any compression.
    pub size: u64,
    /// Bytes of data in it.
    pub data: u64,
    /// Index entries, without padding.
    pub extents: u64,
}

/// Writes a sealed layer front to back, so that it can be compressed, hashed or uploaded on the way.
///
/// Ranges may come in any order; where they overlap, the later one counts.
pub struct LayerWriter<W> {
    out: W,
    info: LayerInfo,
    extents: Vec<Extent>,
    at: u64,
}

impl<W: Write> LayerWriter<W> {
    /// Writes the header to `out`.
    ///
    /// # Errors
    /// [`WriteLayerError`].
    pub fn new(mut out: W, info: LayerInfo) -> Result<Self, WriteLayerError> {
        let kind = Kind::DataHeader { sealed: true, sparse: false };
        let header = Header { kind, index_offset: 0, index_len: 0, info };
        out.write_all(&header.to_block()?)?;
        Ok(Self { out, info: header.info, extents: Vec::new(), at: HEADER_SPACE })
    }

    /// Adds data at `offset` bytes into the image. Both ends must be on a sector.
    ///
    /// # Errors
    /// [`WriteLayerError`].
    pub fn data(&mut self, offset: u64, data: &[u8]) -> Result<(), WriteLayerError> {
        self.gather(&[(offset, data.len() as u64)], data)
    }

    /// Adds data for several ranges (offset, length) of the image, whose bytes follow one another in `data`, with one write.
    /// All ends must be on a sector.
    ///
    /// # Errors
    /// [`WriteLayerError`].
    ///
    /// # Panics
    /// If the lengths do not add up to that of `data`.
    pub fn gather(&mut self, ranges: &[(u64, u64)], data: &[u8]) -> Result<(), WriteLayerError> {
        let lens = ranges.iter().try_fold(0u64, |sum, &(_, len)| sum.checked_add(len));
        assert_eq!(lens, Some(data.len() as u64), "the ranges are not as long as their data");
        for &(offset, len) in ranges {
            sectors(offset, len)?;
        }
        self.out.write_all(data)?;
        for &(offset, len) in ranges {
            let (start, end) = sectors(offset, len)?;
            let place = self.at / SECTOR;
            self.map(start, end, |from, len| Extent::data(from, len, place + from - start));
            self.at += len;
        }
        Ok(())
    }

    /// Adds a range that reads as zeroes and hides what is beneath.
    ///
    /// # Errors
    /// [`WriteLayerError`].
    pub fn zero(&mut self, offset: u64, len: u64) -> Result<(), WriteLayerError> {
        let (start, end) = sectors(offset, len)?;
        let place = self.at / SECTOR;
        self.map(start, end, |from, len| Extent::zero(from, len, place));
        Ok(())
    }

    fn map(&mut self, start: u64, end: u64, extent: impl Fn(u64, u64) -> Extent) {
        let mut from = start;
        while from < end {
            let next = extent(from, (end - from).min(Extent::MAX_LEN));
            from = next.end();
            match self.extents.last_mut().and_then(|last| last.join(next).map(|joined| (last, joined))) {
                Some((last, joined)) => *last = joined,
                None => self.extents.push(next),
            }
        }
    }

    /// Writes the index and the trailer, and gives back the writer.
    ///
    /// # Errors
    /// [`WriteLayerError`]; the layer is then incomplete and will not open.
    pub fn finish(mut self) -> Result<(W, LayerSummary), WriteLayerError> {
        let index = replay(self.extents);
        let padding = padding(index.len(), INDEX_BLOCK);
        let mut block = Vec::with_capacity(INDEX_BLOCK);
        for extent in index.iter().chain(std::iter::repeat_n(&Extent::PADDING, padding)) {
            block.extend_from_slice(&extent.to_bytes());
            if block.len() == INDEX_BLOCK {
                self.out.write_all(&block)?;
                block.clear();
            }
        }
        let index_len = (index.len() + padding) as u64;
        let trailer = Header { kind: Kind::Trailer, index_offset: self.at, index_len, info: self.info };
        self.out.write_all(&trailer.to_block()?)?;
        self.out.flush()?;
        let size = self.at + index_len * Extent::SIZE as u64 + HEADER_SPACE;
        let summary = LayerSummary { size, data: self.at - HEADER_SPACE, extents: index.len() as u64 };
        Ok((self.out, summary))
    }
}

fn sectors(offset: u64, len: u64) -> Result<(u64, u64), WriteLayerError> {
    if offset % SECTOR != 0 || len % SECTOR != 0 {
        return Err(WriteLayerError::Unaligned { offset, len });
    }
    match offset.checked_add(len) {
        Some(end) if end <= crate::MAX_VIRTUAL_SIZE => Ok((offset / SECTOR, end / SECTOR)),
        _ => Err(WriteLayerError::OutOfRange { offset, len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathering_is_the_same_as_range_by_range() {
        let info = || LayerInfo { virtual_size: 1 << 20, ..LayerInfo::default() };
        let data: Vec<u8> = (0u32..2048).map(|i| (i / 7) as u8).collect();
        let mut one = LayerWriter::new(Vec::new(), info()).expect("header");
        one.gather(&[(4096, 512), (8192, 1024), (9216, 512)], &data).expect("gathered");
        let mut each = LayerWriter::new(Vec::new(), info()).expect("header");
        each.data(4096, &data[..512]).expect("data");
        each.data(8192, &data[512..]).expect("data");
        let (one, each) = (one.finish().expect("layer"), each.finish().expect("layer"));
        assert_eq!(one, each);
        assert_eq!(one.1.extents, 2);
    }

    #[test]
    fn nothing_is_written_of_a_bad_gather() {
        let mut writer = LayerWriter::new(Vec::new(), LayerInfo::default()).expect("header");
        let error = writer.gather(&[(0, 512), (100, 512)], &[1; 1024]).expect_err("unaligned");
        assert!(matches!(error, WriteLayerError::Unaligned { offset: 100, len: 512 }));
        assert_eq!(writer.finish().expect("empty").1.data, 0);
    }
}
