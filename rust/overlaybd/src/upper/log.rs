//! The index log of an append-only upper: a header, then entries in the order of the writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::lsmt::{is_valid, Extent, HEADER_SPACE, MAX_EXTENTS};

/// Bytes read at a time: few enough to stay in the processor's cache.
const STEP: usize = 64 << 10;
/// The most entries read back: an upper's log holds every write, not only what is left of them.
const MAX_ENTRIES: u64 = 4 * MAX_EXTENTS;

/// Why a log cannot be read back.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum LogError {
    /// index log entry {0} is damaged although valid ones follow it
    Damaged(u64),
    /// index log of {0} entries is larger than this reader takes
    TooLarge(u64),
    /// reading or repairing the index log failed
    Io(#[from] io::Error),
}

/// The open log.
pub struct IndexLog {
    file: File,
    /// Where the next entry goes, in bytes.
    end: u64,
    /// Entries were appended that may not be on stable storage.
    dirty: bool,
}

impl IndexLog {
    /// An empty log, whose header has been written.
    pub fn new(file: File) -> Self {
        Self { file, end: HEADER_SPACE, dirty: false }
    }

    /// Reads a log whose data file has `data_end` sectors, and gives its entries to `play` in the order they were written.
    ///
    /// What a crash can leave is repaired: a torn or unwritten tail is cut off, and entries of all zeroes (pages that
    /// never reached the disk) become padding. Both concern writes that were never flushed. Any other
    /// damage is an error, so that flushed writes are not dropped silently.
    pub fn open(file: File, data_end: u64, mut play: impl FnMut(Extent)) -> Result<Self, LogError> {
        const ENTRY: u64 = Extent::SIZE as u64;
        let size = file.metadata()?.len();
        let count = size.saturating_sub(HEADER_SPACE) / ENTRY;
        if count > MAX_ENTRIES {
            return Err(LogError::TooLarge(count));
        }
        let mut holes = Vec::new();
        let mut first_bad = None;
        let mut used = 0;
        let mut buf = vec![0u8; STEP.min((count * ENTRY) as usize)];
        let mut at = 0;
        while at < count * ENTRY {
            let step = (count * ENTRY - at).min(STEP as u64) as usize;
            file.read_exact_at(&mut buf[..step], HEADER_SPACE + at)?;
            for (i, entry) in buf[..step].chunks_exact(Extent::SIZE).enumerate() {
                let number = at / ENTRY + i as u64;
                let mut raw = [0u8; Extent::SIZE];
                raw.copy_from_slice(entry);
                let extent = Extent::from_bytes(raw).with_tag(0);
                if raw == [0; Extent::SIZE] {
                    holes.push(number);
                    continue;
                }
                let padding = extent.offset() == Extent::MAX_OFFSET;
                if !padding && !is_valid(extent, data_end) {
                    first_bad = first_bad.or(Some(number));
                    continue;
                }
                if let Some(bad) = first_bad {
                    return Err(LogError::Damaged(bad));
                }
                if !padding {
                    play(extent);
                }
                used = number + 1;
            }
            at += step as u64;
        }
        let end = HEADER_SPACE + used * ENTRY;
        if size != end {
            file.set_len(end)?;
        }
        for hole in holes.into_iter().take_while(|hole| *hole < used) {
            file.write_all_at(&Extent::PADDING.to_bytes(), HEADER_SPACE + hole * ENTRY)?;
        }
        Ok(Self { file, end, dirty: true })
    }

    /// Appends entries. If that fails, the log ends where it did before.
    pub fn append(&mut self, entries: &[Extent]) -> io::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        let mut bytes = Vec::with_capacity(entries.len() * Extent::SIZE);
        entries.iter().for_each(|entry| bytes.extend_from_slice(&entry.to_bytes()));
        self.dirty = true;
        if let Err(error) = self.file.write_all_at(&bytes, self.end) {
            // A later append overwrites what was written in part; cutting it off only helps a crash before that.
            let _ = self.file.set_len(self.end);
            return Err(error);
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Brings the log to stable storage.
    pub fn sync(&mut self) -> io::Result<()> {
        rustix::fs::fdatasync(&self.file)?;
        self.dirty = false;
        Ok(())
    }

    /// Whether a sync is due.
    pub fn is_dirty(&self) -> bool {
        self.dirty
    }
}
