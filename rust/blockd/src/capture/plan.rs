//! Which pages to look at, in batches.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
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

/// Bytes of guest RAM a worker takes at a time: enough that taking costs nothing, few enough that all workers have their share.
const STRIPE: u64 = 16 << 20;

/// Guest RAM that no worker has taken yet.
pub struct Stripes(Mutex<VecDeque<Mapping>>);

impl Stripes {
    pub fn new(mappings: &[Mapping]) -> Self {
        Self(Mutex::new(mappings.iter().copied().collect()))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Mapping>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Mapping> {
        let mut left = self.lock();
        let first = left.front_mut()?;
        let taken = Mapping { length: first.length.min(STRIPE), ..*first };
        match taken.length == first.length {
            true => drop(left.pop_front()),
            false => *first = first.without(taken.length),
        }
        Some(taken)
    }

    /// Leaves nothing to take.
    pub fn clear(&self) {
        self.lock().clear();
    }
}

/// One worker's part in walking guest RAM: finds what may differ from the base.
pub struct Plan<'a> {
    process: &'a Process,
    view: &'a View,
    page_size: u64,
    stripes: &'a Stripes,
    scanner: Scanner,
    /// The stripe at hand, as far as it is still to be scanned.
    stripe: Option<Mapping>,
    found: VecDeque<Run>,
    dirty: Vec<Range<u64>>,
    /// Bytes found dirty so far.
    pub dirty_bytes: u64,
    /// Time spent scanning.
    pub scanning: Duration,
}

impl<'a> Plan<'a> {
    pub fn new(process: &'a Process, view: &'a View, page_size: u64, stripes: &'a Stripes, scanner: Scanner) -> Self {
        Self {
            process,
            view,
            page_size,
            stripes,
            scanner,
            stripe: None,
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
                let Some(stripe) = self.stripe.take().or_else(|| self.stripes.take()) else { break };
                let started = Instant::now();
                self.scan(stripe, left / self.page_size)?;
                self.scanning += started.elapsed();
                continue;
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

    fn scan(&mut self, stripe: Mapping, max_pages: u64) -> Result<(), CaptureError> {
        self.dirty.clear();
        let (start, end) = (stripe.address, stripe.address + stripe.length);
        let known = self
            .scanner
            .next(start..end, max_pages.max(1), &mut self.dirty)
            .map_err(|e| self.process.failed("pagemap", e))?;
        // Addresses to places in the image.
        let place = |address: u64| stripe.offset + (address - start);
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
        self.stripe = (known < end).then(|| stripe.without(known - start));
        Ok(())
    }
}
