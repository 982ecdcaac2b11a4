//! Reading, sifting and writing at the same time.
//!
//! Each worker takes a batch off the plan, reads it, sifts it, waits for its turn and appends what is left to the layer. So one
//! worker's writing overlaps the others' reading, the layer comes out in the plan's order, no bytes move between cores, and
//! memory is bounded by two buffers for each worker.

use std::io::Write;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use overlaybd::{LayerWriter, WriteLayerError};

use super::base::View;
use super::plan::{Origin, Plan, Run};
use super::process::Process;
use super::sift::{Counts, Sieve, Sifted};
use super::CaptureError;

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
    plan: Mutex<Tickets<'a>>,
    line: Mutex<Line<W>>,
    moved: Condvar,
}

struct Tickets<'a> {
    plan: Plan<'a>,
    next: u64,
}

/// Who may write.
struct Line<W> {
    writer: LayerWriter<W>,
    turn: u64,
    failure: Option<Failure>,
    counts: Counts,
    steps: Steps,
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

/// What a pipeline found that came to its end.
#[derive(Debug)]
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

/// Writes what the plan finds, with this many workers, the calling thread among them.
pub fn run<W: Write + Send>(
    work: Work<'_>,
    plan: Plan<'_>,
    writer: LayerWriter<W>,
    workers: usize,
) -> Result<(Found, LayerWriter<W>), Failure> {
    let line = Line { writer, turn: 0, failure: None, counts: Counts::default(), steps: Steps::default() };
    let (plan, line) = (Mutex::new(Tickets { plan, next: 0 }), Mutex::new(line));
    let pipeline = Pipeline { work, plan, line, moved: Condvar::new() };
    std::thread::scope(|scope| {
        for _ in 1..workers {
            // Without another thread it only takes longer.
            if std::thread::Builder::new().name("capture".into()).spawn_scoped(scope, || pipeline.work()).is_err() {
                break;
            }
        }
        pipeline.work();
    });
    let Tickets { plan, .. } = pipeline.plan.into_inner().unwrap_or_else(PoisonError::into_inner);
    let Line { writer, failure, counts, steps, .. } =
        pipeline.line.into_inner().unwrap_or_else(PoisonError::into_inner);
    match failure {
        Some(failure) => Err(failure),
        None => Ok((Found { dirty_bytes: plan.dirty_bytes, counts, scanning: plan.scanning, steps }, writer)),
    }
}

impl<W: Write + Send> Pipeline<'_, W> {
    fn work(&self) {
        let mut steps = Steps::default();
        let ended = self.batches(&mut steps);
        let mut line = self.line();
        line.steps.read += steps.read;
        line.steps.sift += steps.sift;
        line.steps.write += steps.write;
        if let Err(failure) = ended {
            // The first failure is the cause; others may follow from it.
            line.failure.get_or_insert(failure);
            self.moved.notify_all();
        }
    }

    fn batches(&self, steps: &mut Steps) -> Result<(), Failure> {
        let mut buf = Vec::new();
        let mut sieve = Sieve::new(self.work.view, self.work.page_size, self.work.compare);
        let mut sifted = Sifted::default();
        let mut runs = Vec::new();
        while let Some(ticket) = self.take(&mut runs)? {
            let started = Instant::now();
            let len: usize = runs.iter().map(|run| run.len as usize).sum();
            buf.resize(len.max(buf.len()), 0);
            self.read(&runs, &mut buf[..len])?;
            let read = Instant::now();
            sieve.sift(&runs, &mut buf[..len], &mut sifted)?;
            steps.read += read - started;
            steps.sift += read.elapsed();
            let Some(mut line) = self.wait(ticket) else { return Ok(()) };
            let started = Instant::now();
            let written = write(&mut line.writer, &sifted, &buf);
            steps.write += started.elapsed();
            written.map_err(Failure::Write)?;
            line.counts.add(sifted.counts);
            line.turn += 1;
            self.moved.notify_all();
        }
        Ok(())
    }

    /// The next batch and its number; none at the end, or if another worker has failed.
    fn take(&self, runs: &mut Vec<Run>) -> Result<Option<u64>, CaptureError> {
        let mut tickets = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        if self.line().failure.is_some() {
            return Ok(None);
        }
        tickets.plan.next(BATCH as u64, runs)?;
        let ticket = tickets.next;
        tickets.next += 1;
        Ok((!runs.is_empty()).then_some(ticket))
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

    fn line(&self) -> MutexGuard<'_, Line<W>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the batches before this one are written; none if that will never be.
    fn wait(&self, ticket: u64) -> Option<MutexGuard<'_, Line<W>>> {
        let mut line = self.line();
        while line.turn != ticket && line.failure.is_none() {
            line = self.moved.wait(line).unwrap_or_else(PoisonError::into_inner);
        }
        line.failure.is_none().then_some(line)
    }
}

fn write<W: Write>(writer: &mut LayerWriter<W>, sifted: &Sifted, buf: &[u8]) -> Result<(), WriteLayerError> {
    let kept: u64 = sifted.data.iter().map(|&(_, len)| len).sum();
    writer.gather(&sifted.data, &buf[..kept as usize])?;
    sifted.zeroes.iter().try_for_each(|&(offset, len)| writer.zero(offset, len))
}
