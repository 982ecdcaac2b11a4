//! Which pages to look at, in batches.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::base::View;
use super::process::Process;
use super::scan::Scanner;
use super::sys::MAX_IOVECS;
use super::{CaptureError, Mapping};

/// Where the bytes of a run of pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Written by the guest: in the process, from this address on.
    Process(u64),
    /// Not written by the guest: what the mapping showed from the start.
    Unwritten,
}

/// A run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Where its bytes are.
    pub origin: Origin,
    /// Byte of the image it belongs at.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Run {
    /// Cuts off at most `len` bytes from the front.
    fn take(&mut self, len: u64) -> Self {
        let taken = Self { len: len.min(self.len), ..*self };
        self.offset += taken.len;
        self.len -= taken.len;
        if let Origin::Process(address) = &mut self.origin {
            *address += taken.len;
        }
        taken
    }
}

/// Walks guest RAM and hands out what may differ from the base, in order of the request's mappings.
pub struct Plan<'a> {
    process: &'a Process,
    scanner: Scanner,
    view: &'a View,
    page_size: u64,
    /// What is still to be scanned.
    mappings: VecDeque<Mapping>,
    found: VecDeque<Run>,
    dirty: Vec<Range<u64>>,
    /// Bytes found dirty so far.
    pub dirty_bytes: u64,
    /// Time spent scanning.
    pub scanning: Duration,
}

impl<'a> Plan<'a> {
    pub fn new(
        process: &'a Process,
        scanner: Scanner,
        view: &'a View,
        page_size: u64,
        mappings: impl IntoIterator<Item = Mapping>,
    ) -> Self {
        Self {
            process,
            scanner,
            view,
            page_size,
            mappings: mappings.into_iter().collect(),
            found: VecDeque::new(),
            dirty: Vec::new(),
            dirty_bytes: 0,
            scanning: Duration::ZERO,
        }
    }

    /// The next runs, together at most `bytes` long and no more than one `process_vm_readv` takes; none at the end.
    pub fn next(&mut self, bytes: u64, runs: &mut Vec<Run>) -> Result<(), CaptureError> {
        runs.clear();
        let mut left = bytes;
        while left > 0 && runs.len() < MAX_IOVECS {
            let Some(run) = self.found.front_mut() else {
                match self.scan(left / self.page_size)? {
                    true => continue,
                    false => break,
                }
            };
            let taken = run.take(left);
            if run.len == 0 {
                self.found.pop_front();
            }
            left -= taken.len;
            runs.push(taken);
        }
        Ok(())
    }

    /// Scans a stretch; false if nothing is left.
    fn scan(&mut self, max_pages: u64) -> Result<bool, CaptureError> {
        let Some(mapping) = self.mappings.front_mut() else { return Ok(false) };
        let started = Instant::now();
        self.dirty.clear();
        let (start, end) = (mapping.address, mapping.address + mapping.length);
        let known = self
            .scanner
            .next(start..end, max_pages.max(1), &mut self.dirty)
            .map_err(|e| self.process.failed("pagemap", e))?;
        // Addresses to places in the image.
        let place = |address: u64| mapping.offset + (address - start);
        let mut at = start;
        for range in self.dirty.iter().chain(std::iter::once(&(known..known))) {
            self.view.hidden(place(at), place(range.start), self.page_size, |from, to| {
                self.found.push_back(Run { origin: Origin::Unwritten, offset: from, len: to - from });
            });
            let len = range.end - range.start;
            if len > 0 {
                self.found.push_back(Run { origin: Origin::Process(range.start), offset: place(range.start), len });
            }
            self.dirty_bytes += len;
            at = range.end;
        }
        match known == end {
            true => drop(self.mappings.pop_front()),
            false => *mapping = Mapping { address: known, length: end - known, offset: place(known) },
        }
        self.scanning += started.elapsed();
        Ok(true)
    }
}
