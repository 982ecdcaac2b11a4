//! Restoring guest memory: what layers hold, written into a process. The inverse of [`crate::capture`].
//!
//! A VMM that is to go on from a snapshot maps the memory image its guest started from, privately, and shares that image's pages
//! with every other guest of it. What the guest had changed by the time of the snapshot, the layers captured from it, is written
//! over that mapping from outside, with nothing from the VMM. Its cost follows what was changed, never the size of the guest.

mod error;
mod plan;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use overlaybd::{Place, ReadError, Stack, SECTOR};

pub use error::RestoreError;

use crate::capture::process::Process;
use crate::capture::{maps, CaptureError, Mapping};
use plan::{first_held, Piece, Plan};

/// Bytes of a batch: few system calls, in a buffer that is made in no time.
const BATCH: usize = 1 << 20;
/// Threads: one waits for page faults of the process while another reads; few enough to leave the machine to its guests.
const WORKERS: usize = 2;

/// A restore to be made.
#[derive(Clone)]
pub struct Request {
    /// The VMM.
    pub pid: u32,
    /// Its start time (field 22 of `/proc/<pid>/stat`), to tell it from another process that got its number since.
    pub start_time: Option<u64>,
    /// Guest RAM.
    pub mappings: Vec<Mapping>,
    /// What to write: the layers above those that the guest's memory shows already.
    pub stack: Arc<Stack>,
    /// Size of the image in bytes.
    pub size: u64,
}

/// A restore that was made.
#[derive(Debug, Clone, Copy)]
pub struct Report {
    /// Bytes written to the process.
    pub written_bytes: u64,
    /// From start to end.
    pub time: Duration,
}

/// Writes what the layers hold into the memory of a process: data, and zeroes where they say zeroes. Memory no layer says
/// anything about is left alone. The guest must not run meanwhile; blocks for as long as it takes.
///
/// # Errors
/// [`RestoreError`]; a part of the memory may have been written by then.
pub fn restore(request: &Request) -> Result<Report, RestoreError> {
    let started = Instant::now();
    Mapping::check_all(&request.mappings, request.pid, request.size, rustix::param::page_size() as u64)?;
    check_layers(request)?;
    let process = Process::open(request.pid, request.start_time)?;
    let backing = maps::check(&process, &request.mappings)?;

    let plan = Mutex::new(Plan::new(&request.stack, &request.mappings));
    let written_bytes = Writing { stack: &request.stack, process: &process, plan }.run()?;

    // Whatever was written by number went to this process, and to the memory it was said to have.
    process.check_alive()?;
    if maps::check(&process, &request.mappings)? != backing {
        return Err(CaptureError::Mapping(format!("the mappings of process {} changed", request.pid)).into());
    }
    Ok(Report { written_bytes, time: started.elapsed() })
}

/// Checks that the layers are of an image of that size, and hold nothing that guest RAM has no place for.
fn check_layers(request: &Request) -> Result<(), RestoreError> {
    let Request { stack, size, .. } = request;
    if !stack.layers().is_empty() && stack.virtual_size() != *size {
        let there = stack.virtual_size();
        return Err(RestoreError::Invalid(format!(
            "the layers are of an image of {there} bytes, guest RAM is one of {size}"
        )));
    }
    if stack.end() > *size {
        let end = stack.end();
        return Err(RestoreError::Invalid(format!(
            "the layers hold bytes up to {end}, beyond their image of {size} bytes: they are damaged"
        )));
    }
    let mut places: Vec<(u64, u64)> = request.mappings.iter().map(|m| (m.offset, m.offset + m.length)).collect();
    places.sort_unstable();
    places.push((*size, *size));
    let mut at = 0;
    for (start, end) in places {
        if let Some(held) = first_held(stack, at, start) {
            return Err(RestoreError::Invalid(format!(
                "the layers hold bytes at {held} of the image, where guest RAM has no mapping"
            )));
        }
        at = end;
    }
    Ok(())
}

/// What the workers share.
struct Writing<'a> {
    stack: &'a Stack,
    process: &'a Process,
    plan: Mutex<Plan<'a>>,
}

impl<'a> Writing<'a> {
    /// Writes everything; gives how many bytes that were. What fits a single batch takes no other thread.
    fn run(&self) -> Result<u64, RestoreError> {
        let mut pieces = Vec::new();
        if !self.plan().next(BATCH as u64, &mut pieces) {
            return self.write(&pieces, &mut Vec::new());
        }
        std::thread::scope(|scope| {
            let spawn =
                |_| std::thread::Builder::new().name("restore".into()).spawn_scoped(scope, || self.work(Vec::new()));
            // Without another thread it only takes longer.
            let others: Vec<_> = (1..WORKERS).map_while(|i| spawn(i).ok()).collect();
            let mut written = self.work(pieces);
            for other in others {
                let result = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                written = written.and_then(|sum| Ok(sum + result?));
            }
            written
        })
    }

    /// Writes these pieces and then batch after batch until nothing is left, or one has failed.
    fn work(&self, mut pieces: Vec<Piece>) -> Result<u64, RestoreError> {
        let (mut buf, mut written) = (Vec::new(), 0);
        loop {
            match self.write(&pieces, &mut buf) {
                Ok(bytes) => written += bytes,
                Err(error) => {
                    self.plan().clear();
                    return Err(error);
                }
            }
            self.plan().next(BATCH as u64, &mut pieces);
            if pieces.is_empty() {
                return Ok(written);
            }
        }
    }

    fn plan(&self) -> MutexGuard<'_, Plan<'a>> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, pieces: &[Piece], buf: &mut Vec<u8>) -> Result<u64, RestoreError> {
        let len: u64 = pieces.iter().map(|piece| piece.len).sum();
        buf.resize(buf.len().max(len as usize), 0);
        let buf = &mut buf[..len as usize];
        read(self.stack, pieces, buf)?;
        let mut ranges: Vec<(u64, u64)> = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match ranges.last_mut() {
                Some((address, len)) if *address + *len == piece.address => *len += piece.len,
                _ => ranges.push((piece.address, piece.len)),
            }
        }
        self.process.write(&ranges, buf)?;
        Ok(len)
    }
}

/// Fills `buf` with the bytes of `pieces`, one after another. A capture writes pages in their order, so what is scattered in
/// memory is often one run of a layer's file, and read as such.
fn read(stack: &Stack, pieces: &[Piece], mut buf: &mut [u8]) -> Result<(), ReadError> {
    for run in pieces.chunk_by(|a, b| a.joins(b)) {
        let len: u64 = run.iter().map(|piece| piece.len).sum();
        let (part, rest) = std::mem::take(&mut buf).split_at_mut(len as usize);
        buf = rest;
        match run[0].place {
            Place::Hole | Place::Zero => part.fill(0),
            Place::Data { layer, sector } => {
                let (source, offset) = (stack.layers()[usize::from(layer)].source(), sector * SECTOR);
                let len = part.len();
                source.read_exact_at(part, offset).map_err(|source| ReadError::Source {
                    layer,
                    offset,
                    len,
                    source,
                })?;
            }
        }
    }
    Ok(())
}
