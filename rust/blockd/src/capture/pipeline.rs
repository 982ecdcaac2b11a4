//! Scanning, reading, sifting and writing at the same time.
//!
//! Each worker takes a stripe of guest RAM at a time, finds what is dirty there, reads a batch, sifts it and appends what is left
//! to the layer. Only the appending is one at a time, so it overlaps with the others' work; no bytes move between cores, and
//! memory is bounded by two buffers for each worker.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use overlaybd::{LayerWriter, WriteLayerError};

use super::base::View;
use super::plan::{Origin, Plan, Run, Stripes};
use super::process::Process;
use super::scan::Scanner;
use super::sift::{Counts, Sieve, Sifted};
use super::{CaptureError, Mapping};

/// Bytes of a batch. Small enough to stay in a core's own cache between being read and being written.
const BATCH: usize = 1 << 20;

/// Time spent in each step, added up over the workers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Steps {
    /// Copying out of the process (and out of the base, for pages the guest did not write).
    pub read: Duration,
    /// Looking for zero pages, and comparing with the base.
    pub sift: Duration,
    /// Writing the layer's data.
    pub write: Duration,
}

impl Steps {
    fn add(&mut self, other: Self) {
        self.read += other.read;
        self.sift += other.sift;
        self.write += other.write;
    }
}

/// What the workers work on.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    /// The VMM.
    pub process: &'a Process,
    /// What lies beneath the new layer.
    pub view: &'a View,
    /// Bytes of a page.
    pub page_size: u64,
    /// Whether pages are compared with what the base stores.
    pub compare: bool,
}

/// What the workers share.
struct Pipeline<'a, W> {
    work: Work<'a>,
    stripes: Stripes,
    scanner: &'a Scanner,
    layer: Mutex<Sink<W>>,
}

struct Sink<W> {
    writer: LayerWriter<W>,
    failure: Option<Failure>,
    found: Found,
}

/// What stopped the pipeline.
pub enum Failure {
    /// The source, or the base.
    Read(CaptureError),
    /// The layer.
    Write(WriteLayerError),
}

impl From<CaptureError> for Failure {
    fn from(error: CaptureError) -> Self {
        Self::Read(error)
    }
}

impl From<overlaybd::ReadError> for Failure {
    fn from(error: overlaybd::ReadError) -> Self {
        Self::Read(error.into())
    }
}

/// What the workers found, all together.
#[derive(Debug, Default)]
pub struct Found {
    /// Bytes found dirty.
    pub dirty_bytes: u64,
    /// What became of them.
    pub counts: Counts,
    /// Time spent scanning.
    pub scanning: Duration,
    /// Time spent after that.
    pub steps: Steps,
}

/// Writes what is dirty in the mappings, with this many workers, the calling thread among them.
pub fn run<W: Write + Send>(
    work: Work<'_>,
    mappings: &[Mapping],
    scanner: &Scanner,
    writer: LayerWriter<W>,
    workers: usize,
) -> Result<(Found, LayerWriter<W>), Failure> {
    let layer = Mutex::new(Sink { writer, failure: None, found: Found::default() });
    let pipeline = Pipeline { work, stripes: Stripes::new(mappings), scanner, layer };
    std::thread::scope(|scope| {
        for _ in 1..workers {
            // Without another thread it only takes longer.
            if std::thread::Builder::new().name("capture".into()).spawn_scoped(scope, || pipeline.work()).is_err() {
                break;
            }
        }
        pipeline.work();
    });
    let Sink { writer, failure, found } = pipeline.layer.into_inner().unwrap_or_else(PoisonError::into_inner);
    match failure {
        Some(failure) => Err(failure),
        None => Ok((found, writer)),
    }
}

impl<W: Write + Send> Pipeline<'_, W> {
    fn work(&self) {
        let Work { process, view, page_size, .. } = self.work;
        let mut plan = Plan::new(process, view, page_size, &self.stripes, self.scanner.clone());
        let mut steps = Steps::default();
        let ended = self.batches(&mut plan, &mut steps);
        let mut layer = self.layer();
        layer.found.dirty_bytes += plan.dirty_bytes;
        layer.found.scanning += plan.scanning;
        layer.found.steps.add(steps);
        if let Err(failure) = ended {
            // The first failure is the cause; others may follow from it.
            layer.failure.get_or_insert(failure);
            self.stripes.clear();
        }
    }

    fn batches(&self, plan: &mut Plan<'_>, steps: &mut Steps) -> Result<(), Failure> {
        let mut buf = Vec::new();
        let mut sieve = Sieve::new(self.work.view, self.work.page_size, self.work.compare);
        let mut sifted = Sifted::default();
        let mut runs = Vec::new();
        loop {
            plan.next(BATCH as u64, &mut runs)?;
            if runs.is_empty() {
                return Ok(());
            }
            let started = Instant::now();
            let len: usize = runs.iter().map(|run| run.len as usize).sum();
            buf.resize(len.max(buf.len()), 0);
            self.read(&runs, &mut buf[..len])?;
            let read = Instant::now();
            sieve.sift(&runs, &mut buf[..len], &mut sifted)?;
            steps.read += read - started;
            steps.sift += read.elapsed();
            let mut layer = self.layer();
            let started = Instant::now();
            let written = write(&mut layer.writer, &sifted, &buf);
            steps.write += started.elapsed();
            written.map_err(Failure::Write)?;
            layer.found.counts.add(sifted.counts);
        }
    }

    fn layer(&self) -> MutexGuard<'_, Sink<W>> {
        self.layer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, runs: &[Run], mut buf: &mut [u8]) -> Result<(), CaptureError> {
        let mut written = Vec::with_capacity(runs.len());
        for alike in runs.chunk_by(|a, b| matches!((a.origin, b.origin), (Origin::Process(_), Origin::Process(_)))) {
            let len: u64 = alike.iter().map(|run| run.len).sum();
            let (part, rest) = std::mem::take(&mut buf).split_at_mut(len as usize);
            buf = rest;
            written.clear();
            for run in alike {
                match run.origin {
                    Origin::Process(address) => written.push((address, run.len)),
                    Origin::Unwritten => self.work.view.read_unwritten(part, run.offset)?,
                }
            }
            if !written.is_empty() {
                self.work.process.read(&written, part)?;
            }
        }
        Ok(())
    }
}

fn write<W: Write>(writer: &mut LayerWriter<W>, sifted: &Sifted, buf: &[u8]) -> Result<(), WriteLayerError> {
    let kept: u64 = sifted.data.iter().map(|&(_, len)| len).sum();
    writer.gather(&sifted.data, &buf[..kept as usize])?;
    sifted.zeroes.iter().try_for_each(|&(offset, len)| writer.zero(offset, len))
}
