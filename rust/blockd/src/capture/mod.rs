//! Capturing guest memory: what a guest has written, as one layer.
//!
//! The VMM holds guest RAM in private mappings, of an image or anonymous, and is paused by whoever asks. [`capture`] finds the
//! pages the guest has written from outside, with nothing from the VMM, so it serves every VMM alike. Its cost follows what
//! was written, never the size of the guest.
//!
//! A guest that is captured while it runs on still maps the image it started from. To record what it changed since the last
//! capture, give the layers made from it as part of the [`Base`], and those of them that the guest maps in [`Base::mapped`]:
//! pages that those newer layers hold are looked at even if the guest has since given them back.

mod base;
mod error;
pub(crate) mod maps;
mod output;
mod pipeline;
mod plan;
pub(crate) mod process;
mod report;
mod request;
mod room;
mod scan;
mod sift;
pub(crate) mod sys;

use std::sync::Arc;
use std::time::{Duration, Instant};

use overlaybd::{Digest, LayerInfo, LayerSummary, LayerWriter, Uuid, WriteLayerError};

pub use error::CaptureError;
pub use maps::{find_mappings, Ram};
pub use report::{Report, Times};
pub use request::{Base, Mapping, Request};
pub use room::LIMIT as HELD_LIMIT;
pub use scan::Method;

use base::View;
use output::{Output, Progress, Tracked};
use pipeline::{Failure, Found, Work, BATCH};
use process::Process;
use room::Room;
use scan::Scanner;

/// Workers: enough to read while another writes, few enough to leave the machine to its guests.
const WORKERS: std::ops::RangeInclusive<usize> = 2..=4;

/// Captures what a guest has written as a sealed layer. The guest must not run meanwhile; blocks for as long as it takes.
///
/// The layer appears whole under its name or not at all. Pages the guest wrote are left out where the base holds the same.
///
/// # Errors
/// [`CaptureError`]; the source is then as it was, and there is no output.
pub fn capture(request: &Request) -> Result<Report, CaptureError> {
    capture_staged(request, &Stages { hold: 0, ready: &|| Ok(()), copied: &|| {} })
}

/// How a capture in stages agrees with whoever stops the guest.
pub struct Stages<'a> {
    /// Bytes of copies to hold at most, within [`HELD_LIMIT`] for all captures; what is beyond is written before `copied`.
    pub hold: usize,
    /// Everything is prepared, and the guest may still run. Returns when it does not; or with the error to end with.
    pub ready: &'a dyn Fn() -> Result<(), CaptureError>,
    /// Nothing more is needed of the guest. It may go on, and end.
    pub copied: &'a dyn Fn(),
}

/// The same in stages: only between `ready` and `copied` must the guest stand still.
///
/// # Errors
/// As [`capture`], before or after `copied`.
pub fn capture_staged(request: &Request, stages: &Stages<'_>) -> Result<Report, CaptureError> {
    let preparing = Instant::now();
    let page_size = rustix::param::page_size() as u64;
    request.check(page_size)?;
    let process = Process::open(request.pid, request.start_time)?;
    let backing = maps::check(&process, &request.mappings)?;
    let view = View::new(request.base.as_ref(), backing, request.size)?;
    let mut scanner = Scanner::new(Arc::new(process.file("pagemap")?), page_size, backing, request.method);
    let method = scanner.method();
    let output = Output::create(&request.output)?;
    let work = Work { process: &process, view: &view, page_size, compare: request.compare };
    let mut room = match stages.hold {
        0 => Room::new(0),
        hold => Room::new(expected(&mut scanner, &process, &request.mappings)?.min(hold)),
    };
    let prepared = preparing.elapsed();
    (stages.ready)()?;

    let started = Instant::now();
    let copied = || {
        // Whatever was read by number was this process's, and from the memory it was said to have.
        process.check_alive()?;
        if maps::check(&process, &request.mappings)? != backing {
            return Err(CaptureError::Mapping(format!("the mappings of process {} changed", request.pid)));
        }
        (stages.copied)();
        Ok(started.elapsed())
    };
    let written = write_layer(request, &output, work, &scanner, room.bytes(), copied)?;
    drop(room);
    let named = Instant::now();
    output.publish(request.durable)?;
    let Written { found, summary, digest, copy, finish } = written;
    Ok(Report {
        method,
        dirty_pages: found.dirty_bytes / page_size,
        data_pages: found.counts.data,
        zero_pages: found.counts.zero + found.counts.zeroed,
        zeroed_pages: found.counts.zeroed,
        equal_pages: found.counts.equal,
        written_bytes: summary.data,
        layer_bytes: summary.size,
        extents: summary.extents,
        digest,
        times: Times {
            total: prepared + started.elapsed(),
            prepare: prepared,
            copy,
            scan: found.scanning,
            read: found.steps.read,
            compare: found.steps.sift,
            write: found.steps.write,
            finish: finish + named.elapsed(),
        },
    })
}

/// Bytes of room for what is dirty now, and some more: the guest still runs.
fn expected(scanner: &mut Scanner, process: &Process, mappings: &[Mapping]) -> Result<usize, CaptureError> {
    let mut bytes = 0;
    let mut dirty = Vec::new();
    for mapping in mappings {
        let (mut at, end) = (mapping.address, mapping.address + mapping.length);
        while at < end {
            dirty.clear();
            at = scanner.next(at..end, u64::MAX, &mut dirty).map_err(|e| process.failed("pagemap", e))?;
            bytes += dirty.iter().map(|range| range.end - range.start).sum::<u64>();
        }
    }
    // Each worker's last batch may leave a part of its piece of the room unused.
    Ok((bytes + bytes / 16) as usize + (WORKERS.end() + 2) * BATCH)
}

/// A layer's file that only lacks its name.
struct Written {
    found: Found,
    summary: LayerSummary,
    digest: Option<Digest>,
    /// Time until the guest was no longer needed.
    copy: Duration,
    /// Time from the last page to the end.
    finish: Duration,
}

fn write_layer(
    request: &Request,
    output: &Output,
    work: Work<'_>,
    scanner: &Scanner,
    room: &mut [u8],
    copied: impl FnOnce() -> Result<Duration, CaptureError>,
) -> Result<Written, CaptureError> {
    let failed = |e: WriteLayerError| CaptureError::output(&request.output, e);
    let uuid = Uuid::random().map_err(|e| failed(e.into()))?;
    let info = LayerInfo { virtual_size: request.size, uuid, parent: work.view.parent(), user_tag: Vec::new() };
    let progress = Arc::new(Progress::default());
    let file = Tracked::new(output.file().clone(), progress.clone());
    std::thread::scope(|scope| {
        let hash = || progress.follow(output.file());
        let hashing =
            request.digest.then(|| std::thread::Builder::new().name("digest".into()).spawn_scoped(scope, hash));
        // However this ends, the file's writer is dropped, and with it ends the hashing.
        let hashing = hashing.transpose().map_err(|e| failed(e.into()))?;
        let writer = LayerWriter::new(file, info).map_err(failed)?;
        let workers = std::thread::available_parallelism().map_or(*WORKERS.start(), usize::from);
        let workers = workers.clamp(*WORKERS.start(), *WORKERS.end());
        let mut copy = Duration::ZERO;
        let copied = || copied().map(|time| copy = time);
        let run = pipeline::run(work, &request.mappings, scanner, writer, workers, room, copied);
        let (found, writer) = run.map_err(|failure| match failure {
            Failure::Read(e) => e,
            Failure::Write(e) => failed(e),
        })?;
        let finishing = Instant::now();
        let (file, summary) = writer.finish().map_err(failed)?;
        drop(file);
        let digest = match hashing.map(|hashing| hashing.join()) {
            None => None,
            Some(Ok(digest)) => Some(digest.map_err(|e| failed(e.into()))?),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        };
        Ok(Written { found, summary, digest, copy, finish: finishing.elapsed() })
    })
}
