//! Restores into real processes.

// Tests say what they expect, also outside of their own functions.
#![allow(clippy::expect_used)]

#[path = "../capture/guest.rs"]
#[allow(dead_code, reason = "what captures need, too")]
mod guest;

mod faults;
mod layers;
mod roundtrip;

use std::sync::Arc;

use blockd::capture::Mapping;
use blockd::restore::Request;
use overlaybd::Layer;

use guest::{stack, Guest, Memory};

fn request(guest: &Guest, memory: &Memory, layers: &[Arc<Layer>]) -> Request {
    Request {
        pid: guest.pid(),
        start_time: None,
        mappings: vec![memory.at(0)],
        stack: stack(layers),
        size: memory.bytes().len() as u64,
    }
}

/// What a process has in its memory, in the order of the mappings.
fn memory_of(guest: &Guest, mappings: &[Mapping]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for mapping in mappings {
        let at = bytes.len();
        bytes.resize(at + mapping.length as usize, 0);
        let local = libc::iovec { iov_base: bytes[at..].as_mut_ptr().cast(), iov_len: bytes.len() - at };
        let remote = libc::iovec { iov_base: mapping.address as *mut libc::c_void, iov_len: mapping.length as usize };
        // SAFETY: the kernel writes into `local` only, which is the slice.
        let read = unsafe { libc::process_vm_readv(guest.0, &local, 1, &remote, 1, 0) };
        assert_eq!(read, mapping.length as isize, "{}", std::io::Error::last_os_error());
    }
    bytes
}
