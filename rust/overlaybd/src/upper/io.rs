//! Writing to an upper.

use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use crate::image::{ReadError, WriteError};
use crate::index::{Place, Segment};
use crate::lsmt::{Extent, HEADER_SECTORS, HEADER_SPACE, SECTOR};
use crate::stack::Stack;
use crate::sync::{read, write};
use crate::upper::{sparse, Mode, Upper};

/// Entries that may wait for a flush before one is made, so that a guest that never flushes costs bounded memory.
const MAX_PENDING: usize = 1 << 18;
/// Zeroes written at a time.
static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];

impl Upper {
    /// Writes whole granules.
    pub(crate) fn write(&self, buf: &[u8], offset: u64) -> Result<(), WriteError> {
        debug_assert!(self.is_aligned(offset, buf.len() as u64));
        let pending = {
            let sealed = read(&self.gate);
            if *sealed {
                return Err(WriteError::Sealed);
            }
            self.write_granules(buf, offset)?
        };
        self.limit(pending)
    }

    /// Writes any range: reads the granules at its edges, and keeps other writes out meanwhile.
    pub(crate) fn write_unaligned(
        &self,
        buf: &[u8],
        offset: u64,
        read_at: impl Fn(&mut [u8], u64) -> Result<(), ReadError>,
    ) -> Result<(), WriteError> {
        let granule = self.granule();
        let start = offset / granule * granule;
        let end = (offset + buf.len() as u64).next_multiple_of(granule);
        let mut block = vec![0u8; (end - start) as usize];
        let pending = {
            let sealed = write(&self.gate);
            if *sealed {
                return Err(WriteError::Sealed);
            }
            let last = block.len() - granule as usize;
            read_at(&mut block[..granule as usize], start)?;
            if last > 0 {
                read_at(&mut block[last..], start + last as u64)?;
            }
            block[(offset - start) as usize..][..buf.len()].copy_from_slice(buf);
            self.write_granules(&block, start)?
        };
        self.limit(pending)
    }

    /// Makes whole granules read as zeroes. `stack` is what lies beneath.
    pub(crate) fn zero(&self, offset: u64, len: u64, stack: &Stack) -> Result<(), WriteError> {
        debug_assert!(self.is_aligned(offset, len));
        let pending = {
            let sealed = read(&self.gate);
            if *sealed {
                return Err(WriteError::Sealed);
            }
            match self.mode {
                // The place of zeroes means nothing, but overlaybd wants it inside the data section.
                Mode::Append { .. } => self.note(offset, len, |from, len| Extent::zero(from, len, HEADER_SECTORS)),
                Mode::Sparse => {
                    self.zero_sparse(offset, len, stack)?;
                    0
                }
            }
        };
        self.limit(pending)
    }

    /// Writes and enters a range; gives the number of entries that wait for a flush.
    fn write_granules(&self, buf: &[u8], offset: u64) -> Result<usize, WriteError> {
        let (first, len) = (offset / SECTOR, buf.len() as u64);
        let find = || read(&self.state).map.place_of(first, len / SECTOR);
        let Mode::Append { tail, own, overwritten, .. } = &self.mode else {
            self.data.write_all_at(buf, HEADER_SPACE + offset)?;
            // Looked up only now: a range that was given back meanwhile must be entered again.
            return match find() {
                Some(_) => Ok(0),
                None => Ok(self.note(offset, len, |from, len| Extent::data(from, len, from + HEADER_SECTORS))),
            };
        };
        // As on any disk, unflushed bytes may or may not replace flushed ones when power fails. This keeps a guest that
        // rewrites a file from filling the host's disk, and the page cache from growing with every write.
        if let Some(place) = find().filter(|place| place * SECTOR >= *own) {
            let written = self.data.write_all_at(buf, place * SECTOR);
            overwritten.store(true, Ordering::Release);
            return Ok(written.map(|()| 0)?);
        }
        let at = tail.fetch_add(len, Ordering::Relaxed);
        if let Err(error) = self.data.write_all_at(buf, at) {
            // Give the space back if nobody took more, so that retries on a full disk do not add up.
            let _ = tail.compare_exchange(at + len, at, Ordering::Relaxed, Ordering::Relaxed);
            return Err(error.into());
        }
        let place = at / SECTOR;
        Ok(self.note(offset, len, |from, len| Extent::data(from, len, place + (from - first))))
    }

    /// Gives a range of a sparse upper back to the file system, but for what a lower layer would then show, which
    /// real zeroes must hide.
    fn zero_sparse(&self, offset: u64, len: u64, stack: &Stack) -> Result<(), WriteError> {
        let end = offset + len;
        let mut segments: Vec<Segment> = Vec::new();
        stack.resolve(offset / SECTOR, end / SECTOR, &mut segments);
        let mut at = offset;
        for segment in segments.iter().filter(|segment| matches!(segment.place, Place::Data { .. })) {
            let hidden_start = (segment.offset * SECTOR) / sparse::GRANULE * sparse::GRANULE;
            let hidden_end = (segment.end() * SECTOR).next_multiple_of(sparse::GRANULE).min(end);
            self.free(at, hidden_start)?;
            at = at.max(hidden_start);
            self.write_zeroes(at, hidden_end)?;
            at = at.max(hidden_end);
        }
        self.free(at, end)
    }

    fn free(&self, start: u64, end: u64) -> Result<(), WriteError> {
        if start >= end {
            return Ok(());
        }
        // Under the lock, so that a write to the same place comes before or after both steps.
        let mut state = write(&self.state);
        if sparse::punch(&self.data, HEADER_SPACE + start, end - start)? {
            state.map.remove(start / SECTOR, end / SECTOR);
            return Ok(());
        }
        drop(state);
        self.write_zeroes(start, end)
    }

    fn write_zeroes(&self, mut at: u64, end: u64) -> Result<(), WriteError> {
        while at < end {
            let step = (end - at).min(ZEROES.len() as u64);
            self.write_granules(&ZEROES[..step as usize], at)?;
            at += step;
        }
        Ok(())
    }

    /// Enters a range, in bytes, into the index; `extent` makes the entry of a piece of it, in sectors. Gives the number of
    /// entries that wait for a flush.
    fn note(&self, offset: u64, len: u64, extent: impl Fn(u64, u64) -> Extent) -> usize {
        let logged = matches!(self.mode, Mode::Append { .. });
        let (mut from, end) = (offset / SECTOR, (offset + len) / SECTOR);
        let mut state = write(&self.state);
        let state = &mut *state;
        while from < end {
            let next = extent(from, (end - from).min(Extent::MAX_LEN));
            from = next.end();
            state.map.insert(next);
            if !logged {
                continue;
            }
            match state.pending.last_mut().and_then(|last| last.join(next).map(|joined| (last, joined))) {
                Some((last, joined)) => *last = joined,
                None => state.pending.push(next),
            }
        }
        state.pending.len()
    }

    /// Flushes if too many entries wait for it. No lock may be held.
    fn limit(&self, pending: usize) -> Result<(), WriteError> {
        if pending >= MAX_PENDING {
            self.flush()?;
        }
        Ok(())
    }
}
