//! The image a captured layer goes on top of.

use std::sync::Arc;

use overlaybd::{ParentCheck, Place, ReadError, Segment, Stack, Uuid, SECTOR};

use super::maps::Backing;
use super::{Base, CaptureError};

/// What is known about the image beneath the new layer.
pub struct View {
    /// All of it. Without one, the guest runs on an image nothing is known about, and every dirty page must be recorded.
    whole: Option<Arc<Stack>>,
    /// What the mapping shows where the guest wrote nothing.
    below: Arc<Stack>,
    /// Layers of the base that the mapping does not show: made from this guest while it ran.
    above: Option<Stack>,
}

impl View {
    pub fn new(base: Option<&Base>, backing: Backing, size: u64) -> Result<Self, CaptureError> {
        let empty = || Arc::new(Stack::empty());
        let Some(base) = base.filter(|base| !base.stack.layers().is_empty()) else {
            let whole = (backing == Backing::Anonymous).then(empty);
            return Ok(Self { whole, below: empty(), above: None });
        };
        let layers = base.stack.layers();
        if base.stack.virtual_size() != size {
            let there = base.stack.virtual_size();
            return Err(CaptureError::Invalid(format!(
                "the base is an image of {there} bytes, guest RAM one of {size}"
            )));
        }
        let below = match (backing, &base.mapped) {
            (Backing::Anonymous, None) => empty(),
            (Backing::Anonymous, Some(mapped)) if mapped.layers().is_empty() => empty(),
            (Backing::Anonymous, Some(mapped)) => {
                let mapped = mapped.layers().len();
                let message = format!("the guest's memory is anonymous, but said to map {mapped} layers of the base");
                return Err(CaptureError::Invalid(message));
            }
            (Backing::File, None) => base.stack.clone(),
            (Backing::File, Some(mapped)) => mapped.clone(),
        };
        let newer = match layers.split_at_checked(below.layers().len()) {
            Some((lowest, newer)) if lowest.iter().zip(below.layers()).all(|(a, b)| Arc::ptr_eq(a, b)) => newer,
            _ => {
                return Err(CaptureError::Invalid("what the guest maps are not the lowest layers of its base".into()));
            }
        };
        let above = match newer {
            [] => None,
            newer => Some(Stack::open(newer.to_vec(), ParentCheck::Ignore)?),
        };
        Ok(Self { whole: Some(base.stack.clone()), below, above })
    }

    /// The identifier of the layer beneath the new one.
    pub fn parent(&self) -> Uuid {
        self.whole.as_ref().map_or(Uuid::NIL, |stack| stack.top())
    }

    /// Calls `each` with the ranges of whole pages within `start..end` that can differ from the base although the guest's memory
    /// there is as it was mapped: those where the base has a layer that the mapping does not show.
    pub fn hidden(&self, start: u64, end: u64, page_size: u64, mut each: impl FnMut(u64, u64)) {
        let Some(above) = &self.above else { return };
        let mut segments = Vec::new();
        above.resolve(start / SECTOR, end / SECTOR, &mut segments);
        let mut done = start;
        for segment in segments.iter().filter(|segment| segment.place != Place::Hole) {
            let from = (segment.offset * SECTOR / page_size * page_size).max(done);
            let to = (segment.end() * SECTOR).next_multiple_of(page_size).min(end);
            if from < to {
                each(from, to);
                done = to;
            }
        }
    }

    /// What the mapping reads as at `offset` where the guest wrote nothing.
    pub fn read_unwritten(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        let read = self.below.read_at(buf, offset)?;
        buf[read..].fill(0);
        Ok(())
    }

    /// What the base holds at `offset`.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        let read = match &self.whole {
            Some(stack) => stack.read_at(buf, offset)?,
            None => 0,
        };
        buf[read..].fill(0);
        Ok(())
    }

    /// Splits the pages from `start` to `end` into runs by what is known of the base there.
    pub fn holds(&self, start: u64, end: u64, page_size: u64, runs: &mut Vec<(u64, u64, Holds)>) {
        runs.clear();
        let Some(stack) = &self.whole else {
            runs.push((start, end, Holds::Unknown));
            return;
        };
        let mut segments: Vec<Segment> = Vec::new();
        stack.resolve(start / SECTOR, end / SECTOR, &mut segments);
        let mut at = start;
        for segment in segments.iter().filter(|segment| matches!(segment.place, Place::Data { .. })) {
            let from = (segment.offset * SECTOR / page_size * page_size).max(at);
            let to = (segment.end() * SECTOR).next_multiple_of(page_size).min(end);
            push(runs, at, from, Holds::Zeroes);
            push(runs, from, to, Holds::Data);
            at = at.max(to);
        }
        push(runs, at, end, Holds::Zeroes);
    }
}

fn push(runs: &mut Vec<(u64, u64, Holds)>, start: u64, end: u64, holds: Holds) {
    match runs.last_mut() {
        _ if start >= end => {}
        Some(last) if last.1 == start && last.2 == holds => last.1 = end,
        _ => runs.push((start, end, holds)),
    }
}

/// What a base holds in a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Zeroes, stored nowhere.
    Zeroes,
    /// Stored bytes in at least a part of it.
    Data,
    /// Nobody said.
    Unknown,
}
