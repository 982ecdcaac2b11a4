//! In which order an image is read, so that next time it can be fetched ahead.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use overlaybd::{Place, Segment, SECTOR};
use serde::{Deserialize, Serialize};

use crate::image::files::NewFile;
use crate::image::spec::check_path;
use crate::image::Attached;
use crate::{Code, Error};

/// Bytes of the pieces that are told apart.
const CHUNK: u64 = 64 << 10;
/// Most pieces of an image; larger images have larger pieces, so that recording costs at most a few megabytes.
const MAX_CHUNKS: u64 = 1 << 20;
/// Largest working set file taken in.
const MAX_FILE: u64 = 64 << 20;
/// Requests in flight while fetching ahead.
const FETCHERS: usize = 4;
/// Pieces are put in the order of their places within so many bytes; the order of these windows stays.
const WINDOW: u64 = 64 << 20;
/// Ranges closer than this are fetched as one.
const GAP: u64 = 128 << 10;
/// Most bytes of one request.
const REQUEST: u64 = 4 << 20;
/// Largest piece that a working set may have.
const MAX_CHUNK: u64 = 16 << 20;

/// Notes which pieces of an image are read, in the order of the first time.
pub struct Recorder {
    chunk: u64,
    seen: Box<[AtomicU64]>,
    order: Mutex<Vec<u32>>,
}

impl Recorder {
    /// For an image of `size` bytes.
    pub fn new(size: u64) -> Self {
        let chunk = size.div_ceil(MAX_CHUNKS).next_power_of_two().max(CHUNK);
        let words = size.div_ceil(chunk).div_ceil(64) as usize;
        Self { chunk, seen: (0..words).map(|_| AtomicU64::new(0)).collect(), order: Mutex::default() }
    }

    /// A range was read.
    pub fn note(&self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        for i in offset / self.chunk..=(offset + len - 1) / self.chunk {
            let (Some(word), bit) = (self.seen.get((i / 64) as usize), 1 << (i % 64)) else { return };
            if word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
                self.order.lock().unwrap_or_else(PoisonError::into_inner).push(i as u32);
            }
        }
    }

    /// What was read so far.
    pub fn working_set(&self) -> WorkingSet {
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for i in order.iter().map(|i| u64::from(*i)) {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == i => *count += 1,
                _ => runs.push((i, 1)),
            }
        }
        WorkingSet { version: 1, chunk: self.chunk, runs }
    }
}

/// The pieces of an image in the order in which they were first read.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSet {
    version: u32,
    /// Bytes of a piece.
    chunk: u64,
    /// First piece and number of pieces of each run.
    runs: Vec<(u64, u64)>,
}

impl WorkingSet {
    /// How many pieces there are.
    pub fn chunks(&self) -> u64 {
        self.runs.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// Where the pieces within an image of `size` bytes are. Runs may lie: what is outside ends them, and there are no more pieces
    /// than an image can have, so the work is bounded.
    fn pieces(&self, size: u64) -> impl Iterator<Item = u64> + '_ {
        let within = move |i: u64| i.checked_mul(self.chunk).filter(|offset| *offset < size);
        let runs = self.runs.iter();
        let pieces = runs.flat_map(move |(first, count)| (*first..first.saturating_add(*count)).map_while(within));
        pieces.take(size.div_ceil(self.chunk) as usize)
    }

    /// Writes the file `path`.
    ///
    /// # Errors
    /// [`Code::Exists`]; the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let new = NewFile::create(path)?;
        let bytes = serde_json::to_vec(self).map_err(std::io::Error::from);
        bytes
            .and_then(|bytes| new.file().write_all(&bytes))
            .map_err(|e| Error::io(format_args!("writing {}", path.display()), &e))?;
        new.publish()
    }

    /// Reads the file `path`.
    ///
    /// # Errors
    /// It cannot be read, or is no working set.
    pub fn load(path: &Path) -> Result<Self, Error> {
        check_path(path)?;
        let what = format!("reading working set {}", path.display());
        let failed = |e: std::io::Error| Error::io(&what, &e);
        if path.metadata().map_err(failed)?.len() > MAX_FILE {
            return Err(Error::new(Code::Corrupt, format!("{what}: it has more than {MAX_FILE} bytes")));
        }
        let bytes = std::fs::read(path).map_err(failed)?;
        let set: Self = serde_json::from_slice(&bytes).map_err(|e| Error::caused(Code::Corrupt, &what, &e))?;
        if set.version != 1 || !(CHUNK..=MAX_CHUNK).contains(&set.chunk) || !set.chunk.is_power_of_two() {
            let Self { version, chunk, .. } = set;
            return Err(Error::new(Code::Corrupt, format!("{what}: version {version} or piece of {chunk} is unknown")));
        }
        Ok(set)
    }
}

/// Gets the pieces of a working set ready to be read, several at a time: blocks of remote layers into the cache, local files
/// into the page cache. Gives the bytes of the image that were asked for.
///
/// # Errors
/// The first layer that failed.
pub fn prefetch(image: &Attached, set: &WorkingSet) -> Result<u64, Error> {
    let stack = image.image()?.stack();
    let pieces: Vec<u64> = set.pieces(image.size()).collect();
    let ranges: Vec<LayerRange> = pieces
        .chunks((WINDOW / set.chunk).max(1) as usize)
        .flat_map(|window| {
            let mut segments = Vec::new();
            for at in window {
                stack.resolve(at / SECTOR, (at + set.chunk).min(image.size()).div_ceil(SECTOR), &mut segments);
            }
            merge(&segments)
        })
        .collect();
    let next = AtomicUsize::new(0);
    let fetch = || -> std::io::Result<()> {
        while let Some(range) = ranges.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(layer) = stack.layers().get(usize::from(range.layer)) else { continue };
            layer.source().prefetch(range.start, range.end - range.start).inspect_err(|_| {
                next.store(ranges.len(), Ordering::Relaxed);
            })?;
        }
        Ok(())
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let fetchers: Vec<_> = (0..FETCHERS).map(|_| scope.spawn(fetch)).collect();
        fetchers.into_iter().map(|fetcher| fetcher.join()).collect()
    });
    for result in results {
        let result = result.map_err(|_| Error::new(Code::Io, "a prefetching thread panicked"))?;
        result.map_err(|e| Error::caused(Code::Io, format_args!("prefetching image {}", image.name()), &e))?;
    }
    Ok(pieces.iter().map(|at| set.chunk.min(image.size() - at)).sum())
}

/// Bytes of a layer's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LayerRange {
    layer: u16,
    start: u64,
    end: u64,
}

/// What the segments hold, by layer and place in it, in ranges as large as a request should be.
fn merge(segments: &[Segment]) -> Vec<LayerRange> {
    let range = |segment: &Segment| match segment.place {
        Place::Data { layer, sector } => {
            Some(LayerRange { layer, start: sector * SECTOR, end: (sector + segment.len) * SECTOR })
        }
        Place::Hole | Place::Zero => None,
    };
    let mut ranges: Vec<_> = segments.iter().filter_map(range).collect();
    ranges.sort_unstable_by_key(|range| (range.layer, range.start));
    let mut merged: Vec<LayerRange> = Vec::new();
    for next in ranges {
        match merged.last_mut() {
            Some(last) if last.layer == next.layer && next.start <= last.end + GAP => last.end = last.end.max(next.end),
            _ => merged.push(next),
        }
    }
    let cut = |LayerRange { layer, start, end }: LayerRange| {
        (start..end).step_by(REQUEST as usize).map(move |at| LayerRange {
            layer,
            start: at,
            end: end.min(at + REQUEST),
        })
    };
    merged.into_iter().flat_map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_order_of_first_reads() {
        let recorder = Recorder::new(10 * CHUNK);
        recorder.note(5 * CHUNK + 7, 2 * CHUNK);
        recorder.note(0, 1);
        recorder.note(6 * CHUNK, 1);
        recorder.note(100 * CHUNK, 1);
        recorder.note(1, 0);
        let set = recorder.working_set();
        assert_eq!(set.runs, [(5, 3), (0, 1)]);
        assert_eq!(set.chunks(), 4);
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("set");
        set.save(&path).expect("saved");
        assert_eq!(WorkingSet::load(&path).expect("loaded"), set);
        std::fs::write(&path, b"{\"version\":1,\"chunk\":0,\"runs\":[]}").expect("written");
        assert_eq!(WorkingSet::load(&path).err().map(|e| e.code), Some(Code::Corrupt));
    }

    #[test]
    fn absurd_sizes_cost_little() {
        assert!(Recorder::new(overlaybd::MAX_VIRTUAL_SIZE).seen.len() as u64 <= MAX_CHUNKS / 64);
        let runs = vec![(3, u64::MAX), (0, 1), (u64::MAX, 2), (1, u64::MAX)];
        let set = WorkingSet { version: 1, chunk: CHUNK, runs };
        assert_eq!(set.pieces(5 * CHUNK - 1).collect::<Vec<_>>(), [3, 4, 0, 1, 2].map(|i| i * CHUNK));
    }

    #[test]
    fn neighbours_become_large_ranges() {
        const MIB: u64 = 1 << 20;
        let data = |layer, at: u64, len: u64| Segment {
            offset: 77,
            len: len / SECTOR,
            place: Place::Data { layer, sector: at / SECTOR },
        };
        let zero = Segment { place: Place::Zero, ..data(0, 0, MIB) };
        let segments = [
            data(0, 5 * MIB, MIB),
            data(1, 0, CHUNK),
            zero,
            data(0, 6 * MIB + GAP, 4 * MIB),
            data(1, GAP + 2 * CHUNK, CHUNK),
            data(0, 5 * MIB + CHUNK, CHUNK),
        ];
        let merged: Vec<_> = merge(&segments).iter().map(|range| (range.layer, range.start, range.end)).collect();
        let end = 10 * MIB + GAP;
        let expected = [(0, 5 * MIB, 9 * MIB), (0, 9 * MIB, end), (1, 0, CHUNK), (1, GAP + 2 * CHUNK, GAP + 3 * CHUNK)];
        assert_eq!(merged, expected);
    }
}
