//! Scanning, reading, sifting and writing at the same time.
//!
//! Each worker takes a stripe of guest RAM at a time, finds what is dirty there, reads a batch, sifts it and appends what is left
//! to the layer. Only the appending is one at a time, so it overlaps with the others' work; no bytes move between cores, and
//! memory is bounded by two buffers for each worker.
//!
//! If there is room to hold batches, they are only read into it, as far as it goes, and sifted and written in a second step, for
//! which the guest is not needed.

use std::io::Write;
use std::slice::ChunksMut;
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
pub const BATCH: usize = 1 << 20;

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
struct Pipeline<'a, 'r, W> {
    work: Work<'a>,
    stripes: Stripes,
    scanner: &'a Scanner,
    room: Mutex<ChunksMut<'r, u8>>,
    held: Mutex<Vec<Held<'r>>>,
    layer: Mutex<Sink<W>>,
}

/// A batch that was read, to be sifted and written later.
struct Held<'r> {
    runs: Vec<Run>,
    bytes: &'r mut [u8],
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

/// Writes what is dirty in the mappings, with this many workers, the calling thread among them. `copied` is called when all
/// that is needed of the process was read: batches for which there is `room` are written only then, by one worker less, as
/// the guest wants the processors again.
pub fn run<W: Write + Send>(
    work: Work<'_>,
    mappings: &[Mapping],
    scanner: &Scanner,
    writer: LayerWriter<W>,
    workers: usize,
    room: &mut [u8],
    copied: impl FnOnce() -> Result<(), CaptureError>,
) -> Result<(Found, LayerWriter<W>), Failure> {
    let pipeline = Pipeline {
        work,
        stripes: Stripes::new(mappings),
        scanner,
        room: Mutex::new(room.chunks_mut(BATCH)),
        held: Mutex::default(),
        layer: Mutex::new(Sink { writer, failure: None, found: Found::default() }),
    };
    side_by_side(workers, || pipeline.read_all());
    if pipeline.layer().failure.is_none() {
        copied()?;
        side_by_side(workers.saturating_sub(1), || pipeline.write_held());
    }
    let Sink { writer, failure, found } = pipeline.layer.into_inner().unwrap_or_else(PoisonError::into_inner);
    match failure {
        Some(failure) => Err(failure),
        None => Ok((found, writer)),
    }
}

fn side_by_side(workers: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        for _ in 1..workers {
            // Without another thread it only takes longer.
            if std::thread::Builder::new().name("capture".into()).spawn_scoped(scope, &work).is_err() {
                break;
            }
        }
        work();
    });
}

impl<W: Write + Send> Pipeline<'_, '_, W> {
    fn read_all(&self) {
        let Work { process, view, page_size, .. } = self.work;
        let mut plan = Plan::new(process, view, page_size, &self.stripes, self.scanner.clone());
        let mut steps = Steps::default();
        let ended = self.batches(&mut plan, &mut steps);
        let mut layer = self.layer();
        layer.found.dirty_bytes += plan.dirty_bytes;
        layer.found.scanning += plan.scanning;
        drop(layer);
        self.ended(steps, ended);
    }

    fn write_held(&self) {
        let mut steps = Steps::default();
        let ended = self.held_batches(&mut steps);
        self.ended(steps, ended);
    }

    fn ended(&self, steps: Steps, ended: Result<(), Failure>) {
        let mut layer = self.layer();
        layer.found.steps.add(steps);
        if let Err(failure) = ended {
            // The first failure is the cause; others may follow from it.
            layer.failure.get_or_insert(failure);
            self.stripes.clear();
            lock(&self.held).clear();
        }
    }

    fn batches(&self, plan: &mut Plan<'_>, steps: &mut Steps) -> Result<(), Failure> {
        let mut own = Vec::new();
        let mut sieve = self.sieve();
        let mut sifted = Sifted::default();
        let mut runs = Vec::new();
        loop {
            plan.next(BATCH as u64, &mut runs)?;
            if runs.is_empty() {
                return Ok(());
            }
            let len: usize = runs.iter().map(|run| run.len as usize).sum();
            // The last piece of the room may be shorter than a batch.
            let held = lock(&self.room).next().filter(|room| room.len() >= len);
            let started = Instant::now();
            if let Some(room) = held {
                let bytes = &mut room[..len];
                self.read(&runs, bytes)?;
                steps.read += started.elapsed();
                lock(&self.held).push(Held { runs: std::mem::take(&mut runs), bytes });
                continue;
            }
            own.resize(len.max(own.len()), 0);
            self.read(&runs, &mut own[..len])?;
            steps.read += started.elapsed();
            self.write(&runs, &mut own[..len], &mut sieve, &mut sifted, steps)?;
        }
    }

    fn held_batches(&self, steps: &mut Steps) -> Result<(), Failure> {
        let mut sieve = self.sieve();
        let mut sifted = Sifted::default();
        loop {
            let Some(Held { runs, bytes }) = lock(&self.held).pop() else { return Ok(()) };
            self.write(&runs, bytes, &mut sieve, &mut sifted, steps)?;
        }
    }

    fn sieve(&self) -> Sieve<'_> {
        Sieve::new(self.work.view, self.work.page_size, self.work.compare)
    }

    fn write(
        &self,
        runs: &[Run],
        bytes: &mut [u8],
        sieve: &mut Sieve<'_>,
        sifted: &mut Sifted,
        steps: &mut Steps,
    ) -> Result<(), Failure> {
        let started = Instant::now();
        sieve.sift(runs, bytes, sifted)?;
        steps.sift += started.elapsed();
        let mut layer = self.layer();
        let started = Instant::now();
        let written = write(&mut layer.writer, sifted, bytes);
        steps.write += started.elapsed();
        written.map_err(Failure::Write)?;
        layer.found.counts.add(sifted.counts);
        Ok(())
    }

    fn layer(&self) -> MutexGuard<'_, Sink<W>> {
        lock(&self.layer)
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

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write<W: Write>(writer: &mut LayerWriter<W>, sifted: &Sifted, buf: &[u8]) -> Result<(), WriteLayerError> {
    let kept: u64 = sifted.data.iter().map(|&(_, len)| len).sum();
    writer.gather(&sifted.data, &buf[..kept as usize])?;
    sifted.zeroes.iter().try_for_each(|&(offset, len)| writer.zero(offset, len))
}
