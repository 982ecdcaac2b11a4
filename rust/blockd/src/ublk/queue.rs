//! Taking requests from the kernel and answering them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::{opcode, types};
use libublk::helpers::IoBuf;
use libublk::io::{BufDesc, BufDescList, UblkDev, UblkIOCtx, UblkQueue};
use libublk::sys::{UBLK_IO_OP_DISCARD, UBLK_IO_OP_FLUSH, UBLK_IO_OP_READ, UBLK_IO_OP_WRITE, UBLK_IO_OP_WRITE_ZEROES};
use libublk::{UblkError, UblkIORes};
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;

use super::pool::Pool;
use crate::image::Attached;

/// Answers on their way from the workers to the queue's thread, the only one that may talk to the kernel.
struct Answers {
    done: Mutex<Vec<(u16, i32)>>,
    /// Wakes the queue's thread.
    bell: OwnedFd,
}

impl Answers {
    fn give(&self, tag: u16, result: i32) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).push((tag, result));
        if let Err(error) = rustix::io::write(&self.bell, &1u64.to_ne_bytes()) {
            // Full is fine: it is ringing already.
            if error != Errno::AGAIN {
                tracing::error!(%error, "waking a ublk queue failed");
            }
        }
    }

    fn take(&self) -> Vec<(u16, i32)> {
        let mut count = [0; 8];
        // Empties the bell before the answers, so that one given in between rings again.
        let _ = rustix::io::read(&self.bell, &mut count);
        std::mem::take(&mut self.done.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One request, as the kernel describes it.
#[derive(Clone, Copy)]
struct Request {
    op: u32,
    offset: u64,
    len: usize,
}

/// Serves a queue until its device is stopped.
pub fn serve(id: u16, device: &UblkDev, image: &Arc<Attached>, pool: &Arc<Pool>) -> Result<(), UblkError> {
    let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
        .map_err(|e| UblkError::OtherError(-e.raw_os_error()))?;
    let answers = Arc::new(Answers { done: Mutex::default(), bell });
    let buffers = Arc::new(device.alloc_queue_io_bufs());
    let queue = UblkQueue::new(id, device)?.submit_fetch_commands_unified(BufDescList::Slices(Some(&buffers)))?;
    listen(&queue, &answers)?;
    queue.wait_and_handle_io(|queue, tag, event| {
        if !event.is_tgt_io() {
            let described = queue.get_iod(tag);
            let request = Request {
                op: described.op_flags & 0xff,
                offset: described.start_sector << 9,
                len: (described.nr_sectors as usize) << 9,
            };
            let (image, buffers, answers) = (image.clone(), buffers.clone(), answers.clone());
            pool.run(Box::new(move || {
                let result = carry_out(&image, request, &buffers[usize::from(tag)]);
                answers.give(tag, result);
                if request.op == UBLK_IO_OP_READ {
                    image.read_ahead(request.offset, request.len as u64);
                }
            }));
            return;
        }
        for (tag, result) in answers.take() {
            let buffer = BufDesc::Slice(buffers[usize::from(tag)].as_slice());
            if let Err(error) = queue.complete_io_cmd_unified(tag, buffer, Ok(UblkIORes::Result(result))) {
                tracing::error!(image = image.name(), tag, %error, "a ublk request stays unanswered");
            }
        }
        if let Err(error) = listen(queue, &answers) {
            tracing::error!(image = image.name(), %error, "a ublk queue hears of no further answers");
        }
    });
    Ok(())
}

/// Asks for an event when the bell rings.
fn listen(queue: &UblkQueue<'_>, answers: &Answers) -> Result<(), UblkError> {
    const READABLE: u32 = 1;
    let poll = opcode::PollAdd::new(types::Fd(answers.bell.as_fd().as_raw_fd()), READABLE).build();
    queue.ublk_submit_sqe_sync(poll.user_data(UblkIOCtx::build_user_data(0, 0, 0, true)))
}

/// Gives what the kernel is to be told: bytes, or a negative errno.
fn carry_out(image: &Attached, request: Request, buffer: &IoBuf<u8>) -> i32 {
    let Request { op, offset, len } = request;
    let done = match op {
        UBLK_IO_OP_READ | UBLK_IO_OP_WRITE if len > buffer.len() => Err(Errno::INVAL),
        UBLK_IO_OP_READ => {
            // SAFETY: the buffer has at least `len` bytes. From the fetch of a request to its answer, which comes after
            // this, its buffer belongs to the request alone: the kernel does not touch it, and each tag is carried
            // out by one worker at a time.
            let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr(), len) };
            image.read(bytes, offset)
        }
        UBLK_IO_OP_WRITE => image.write(&buffer.as_slice()[..len], offset),
        UBLK_IO_OP_FLUSH => image.flush().map(|()| 0),
        // What is discarded reads as zeroes: a guest gains by knowing, and it costs nothing more here.
        UBLK_IO_OP_DISCARD | UBLK_IO_OP_WRITE_ZEROES => image.zero(offset, len as u64).map(|()| 0),
        _ => Err(Errno::OPNOTSUPP),
    };
    match done {
        Ok(bytes) => bytes as i32,
        Err(errno) => -errno.raw_os_error(),
    }
}
