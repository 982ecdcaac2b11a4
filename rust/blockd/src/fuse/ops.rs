//! Answering one request.

use std::io::{IoSlice, Write};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::abi::{
    fopen, init, opcode, setattr, Attr, AttrOut, Dirent, EntryOut, FallocateIn, InHeader, InitIn, InitOut, LseekIn,
    OpenIn, OpenOut, OutHeader, ReadWriteIn, SetattrIn, StatfsOut, WriteOut, MAJOR, MINOR, MIN_MINOR, ROOT,
};
use super::session::{Session, MAX_IO};
use crate::image::{Attached, Seek, Turn, WaitingRead};

/// Seconds the kernel may keep attributes: they do not change while an image is attached, and node numbers are never used
/// twice. Names are asked for every time, as an image may be attached under one that was just detached.
const ATTR_VALID: u64 = 24 * 3600;
/// Requests the kernel keeps in flight that nobody waits for in a system call (asynchronous I/O, read-ahead), over all
/// images: enough that one whose origin stalls does not hold up the others.
const MAX_BACKGROUND: u16 = 4096;

type Answer<T> = Result<T, Errno>;

/// Answers the request with this header; `body` is the rest of the buffer, of which `len` less the header was read.
pub fn answer(session: &Session, header: &InHeader, body: &mut [u8], len: usize) {
    let args_len = len.saturating_sub(size_of::<InHeader>()).min(body.len());
    let reply = Reply { session, unique: header.unique };
    let args = &body[..args_len];
    match header.opcode {
        opcode::READ => match (parse::<ReadWriteIn>(args), session.table.node(header.nodeid)) {
            (Ok(args), Some(image)) => {
                let read = WaitingRead { unique: header.unique, offset: args.offset, size: args.size };
                serve_reads(session, &image, read, data_area(body));
            }
            _ => reply.error(Errno::STALE),
        },
        opcode::WRITE => reply.plain(write(session, header.nodeid, args)),
        opcode::FSYNC => reply.empty(image(session, header).and_then(|image| image.flush())),
        opcode::FALLOCATE => reply.empty(fallocate(session, header, args)),
        opcode::LOOKUP => reply.plain(lookup(session, header.nodeid, args)),
        opcode::GETATTR => reply.plain(attributes(session, header.nodeid)),
        opcode::SETATTR => reply.plain(set_attributes(session, header.nodeid, args)),
        opcode::OPEN => open(session, header, args, &reply),
        opcode::RELEASE => {
            if let Some(image) = session.table.node(header.nodeid) {
                image.handles().release();
            }
            reply.empty(Ok(()));
        }
        opcode::LSEEK => reply.plain(lseek(session, header, args)),
        opcode::STATFS => reply.plain(Ok(StatfsOut { bsize: 4096, frsize: 4096, namelen: 255, ..Default::default() })),
        opcode::OPENDIR => reply.plain(Ok(OpenOut { fh: 0, open_flags: 0, backing_id: 0 })),
        opcode::READDIR => match list(session, args) {
            Ok(entries) => reply.send(0, &[&entries]),
            Err(errno) => reply.error(errno),
        },
        opcode::RELEASEDIR => reply.empty(Ok(())),
        opcode::INIT => match initialise(args) {
            Ok(out) => reply.send(0, &[out.as_bytes()]),
            Err(errno) => reply.error(errno),
        },
        // These have no answer. Requests are not cancelled: each is bounded in time by itself.
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => {}
        opcode::DESTROY => reply.empty(Ok(())),
        // The kernel remembers this answer and does not ask again, e.g. for extended attributes before each write.
        _ => reply.error(Errno::NOSYS),
    }
}

struct Reply<'a> {
    session: &'a Session,
    unique: u64,
}

impl Reply<'_> {
    fn send(&self, error: i32, parts: &[&[u8]]) {
        let len = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
        let header = OutHeader { len: len as u32, error, unique: self.unique };
        let mut slices = [IoSlice::new(header.as_bytes()), IoSlice::new(&[])];
        for (slice, part) in slices[1..].iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        if let Err(error) = (&*self.session.device).write_vectored(&slices[..=parts.len()]) {
            // ENOENT: who asked is gone. Without a connection there is nobody to tell either.
            if !matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::NODEV | Errno::NOTCONN)) {
                tracing::warn!(%error, "a FUSE request stays unanswered");
            }
        }
    }

    fn error(&self, errno: Errno) {
        self.send(-errno.raw_os_error(), &[]);
    }

    fn empty(&self, result: Answer<()>) {
        match result {
            Ok(()) => self.send(0, &[]),
            Err(errno) => self.error(errno),
        }
    }

    fn plain<T: IntoBytes + Immutable + KnownLayout>(&self, result: Answer<T>) {
        match result {
            Ok(out) => self.send(0, &[out.as_bytes()]),
            Err(errno) => self.error(errno),
        }
    }
}

fn parse<T: FromBytes>(args: &[u8]) -> Answer<T> {
    T::read_from_prefix(args).map(|(value, _)| value).map_err(|_| Errno::INVAL)
}

/// Where the data of a write lies, which an answer to a read reuses: after the arguments, on a page.
fn data_area(body: &mut [u8]) -> &mut [u8] {
    &mut body[size_of::<ReadWriteIn>()..]
}

fn image(session: &Session, header: &InHeader) -> Answer<Arc<Attached>> {
    session.table.node(header.nodeid).ok_or(Errno::STALE)
}

/// Serves a read, and then those of the same image that had to wait because it had enough of them running.
fn serve_reads(session: &Session, image: &Arc<Attached>, first: WaitingRead, buf: &mut [u8]) {
    let Turn::Now = image.gate().enter(first) else { return };
    let mut next = Some(first);
    while let Some(read) = next {
        let reply = Reply { session, unique: read.unique };
        let part = &mut buf[..(read.size as usize).min(MAX_IO)];
        match image.read(part, read.offset) {
            Ok(len) => reply.send(0, &[&part[..len]]),
            Err(errno) => reply.error(errno),
        }
        image.read_ahead(read.offset, read.size.into());
        next = image.gate().leave();
    }
}

fn write(session: &Session, node: u64, args: &[u8]) -> Answer<WriteOut> {
    let request = parse::<ReadWriteIn>(args)?;
    let data = args[size_of::<ReadWriteIn>()..].get(..request.size as usize).ok_or(Errno::INVAL)?;
    let image = session.table.node(node).ok_or(Errno::STALE)?;
    let size = image.write(data, request.offset)? as u32;
    Ok(WriteOut { size, padding: 0 })
}

fn fallocate(session: &Session, header: &InHeader, args: &[u8]) -> Answer<()> {
    const KEEP_SIZE: u32 = 1;
    const PUNCH_HOLE: u32 = 2;
    const ZERO_RANGE: u32 = 16;
    let request = parse::<FallocateIn>(args)?;
    let image = image(session, header)?;
    match request.mode & !KEEP_SIZE {
        // Those who punch holes rely on reading exact zeroes there (QEMU writes zeroes that way).
        PUNCH_HOLE | ZERO_RANGE => image.zero(request.offset, request.length),
        _ => Err(Errno::OPNOTSUPP),
    }
}

fn lookup(session: &Session, parent: u64, args: &[u8]) -> Answer<EntryOut> {
    let name = args.strip_suffix(b"\0").and_then(|name| std::str::from_utf8(name).ok()).ok_or(Errno::NOENT)?;
    if parent != ROOT {
        return Err(Errno::NOTDIR);
    }
    let image = session.table.get(name).ok_or(Errno::NOENT)?;
    Ok(EntryOut {
        nodeid: image.node(),
        generation: 0,
        entry_valid: 0,
        attr_valid: ATTR_VALID,
        entry_valid_nsec: 0,
        attr_valid_nsec: 0,
        attr: file_attributes(&image),
    })
}

fn attributes(session: &Session, node: u64) -> Answer<AttrOut> {
    let attr = match node {
        ROOT => Attr { ino: ROOT, mode: 0o040_711, nlink: 2, blksize: 4096, ..Attr::default() },
        node => file_attributes(&*session.table.node(node).ok_or(Errno::STALE)?),
    };
    Ok(AttrOut { attr_valid: ATTR_VALID, attr_valid_nsec: 0, dummy: 0, attr })
}

fn file_attributes(image: &Attached) -> Attr {
    let since = image.attached_at().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, nanoseconds) = (since.as_secs(), since.subsec_nanos());
    let mode = match (image.is_writable(), image.is_shared()) {
        (true, _) => 0o100_600,
        (false, true) => 0o100_444,
        (false, false) => 0o100_400,
    };
    Attr {
        ino: image.node(),
        size: image.size(),
        blocks: image.size().div_ceil(512),
        atime: seconds,
        mtime: seconds,
        ctime: seconds,
        atimensec: nanoseconds,
        mtimensec: nanoseconds,
        ctimensec: nanoseconds,
        mode,
        nlink: 1,
        uid: image.owner().uid,
        gid: image.owner().gid,
        blksize: 4096,
        ..Attr::default()
    }
}

fn set_attributes(session: &Session, node: u64, args: &[u8]) -> Answer<AttrOut> {
    let request = parse::<SetattrIn>(args)?;
    let image = session.table.node(node).ok_or(Errno::PERM)?;
    if request.valid & (setattr::MODE | setattr::UID | setattr::GID) != 0 {
        return Err(Errno::PERM);
    }
    // Like a block device, an image keeps its size. Times may be set, to no effect.
    if request.valid & setattr::SIZE != 0 && request.size != image.size() {
        return Err(Errno::INVAL);
    }
    attributes(session, node)
}

fn open(session: &Session, header: &InHeader, args: &[u8], reply: &Reply<'_>) {
    let opened = parse::<OpenIn>(args).and_then(|request| {
        let image = image(session, header)?;
        let writes = request.flags & 0b11 != 0;
        if writes && !image.is_writable() {
            return Err(Errno::ROFS);
        }
        match image.handles().acquire() {
            true => Ok(image),
            false => Err(Errno::NOENT),
        }
    });
    let open_flags = match opened.as_ref().map(|image| image.is_writable()) {
        Ok(true) => fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES | fopen::NOFLUSH,
        // Nothing changes a read-only image, so pages stay valid from one opening to the next.
        Ok(false) => fopen::KEEP_CACHE | fopen::NOFLUSH,
        Err(_) => 0,
    };
    reply.plain(opened.map(|_| OpenOut { fh: 0, open_flags, backing_id: 0 }));
}

fn lseek(session: &Session, header: &InHeader, args: &[u8]) -> Answer<u64> {
    let request = parse::<LseekIn>(args)?;
    let what = match request.whence {
        3 => Seek::Data,
        4 => Seek::Hole,
        _ => return Err(Errno::INVAL),
    };
    image(session, header)?.seek(request.offset, what)
}

fn list(session: &Session, args: &[u8]) -> Answer<Vec<u8>> {
    let request = parse::<ReadWriteIn>(args)?;
    let mut out = Vec::new();
    // An entry's offset is its node number: entries after it are those of later nodes, whatever was detached meanwhile.
    for image in session.table.after(request.offset) {
        let name = image.name().as_bytes();
        let len = (size_of::<Dirent>() + name.len()).next_multiple_of(8);
        if out.len() + len > request.size as usize {
            break;
        }
        let end = out.len() + len;
        let entry = Dirent { ino: image.node(), off: image.node(), namelen: name.len() as u32, kind: 0o10 };
        out.extend_from_slice(entry.as_bytes());
        out.extend_from_slice(name);
        out.resize(end, 0);
    }
    Ok(out)
}

fn initialise(args: &[u8]) -> Answer<InitOut> {
    let request = parse::<InitIn>(args)?;
    if request.major != MAJOR || request.minor < MIN_MINOR {
        tracing::error!(request.major, request.minor, "FUSE 7.{MIN_MINOR} or later is needed: Linux 5.4");
        return Err(Errno::PROTO);
    }
    let flags2 = args.get(16..20).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes);
    let offered = u64::from(request.flags) | u64::from(flags2) << 32;
    let wanted = init::ASYNC_READ
        | init::BIG_WRITES
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::MAX_PAGES
        | init::INIT_EXT
        | init::DIRECT_IO_ALLOW_MMAP;
    let granted = offered & wanted;
    tracing::info!(minor = request.minor, flags = format_args!("{granted:#x}"), "FUSE connection is up");
    Ok(InitOut {
        major: MAJOR,
        minor: MINOR.min(request.minor),
        max_readahead: MAX_IO as u32,
        flags: granted as u32,
        flags2: (granted >> 32) as u32,
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND / 4 * 3,
        max_write: MAX_IO as u32,
        time_gran: 1,
        max_pages: (MAX_IO / 4096) as u16,
        ..InitOut::default()
    })
}
