//! Telling the kernel to forget what it has cached.

use std::fs::File;
use std::io::{self, IoSlice, Write};

use zerocopy::IntoBytes;

use super::abi::{InvalEntry, InvalInode, OutHeader, NOTIFY_INVAL_ENTRY, NOTIFY_INVAL_INODE, ROOT};

/// Makes the kernel drop a file's cached pages, and then its name and inode.
///
/// Must not be called while answering a request: the kernel may wait for locks that the request's caller holds.
pub fn forget(device: &File, node: u64, name: &str) -> io::Result<()> {
    forget_content(device, node)?;
    let entry = InvalEntry { parent: ROOT, namelen: name.len() as u32, flags: 0 };
    send(device, NOTIFY_INVAL_ENTRY, &[entry.as_bytes(), name.as_bytes(), b"\0"])
}

/// Makes the kernel drop a file's cached pages and attributes. It waits for pages that are being read.
///
/// Must not be called while answering a request, as [`forget`].
pub fn forget_content(device: &File, node: u64) -> io::Result<()> {
    let inode = InvalInode { ino: node, off: 0, len: 0 };
    send(device, NOTIFY_INVAL_INODE, &[inode.as_bytes()])
}

fn send(mut device: &File, code: i32, parts: &[&[u8]]) -> io::Result<()> {
    let len = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
    let header = OutHeader { len: len as u32, error: code, unique: 0 };
    let mut slices = vec![IoSlice::new(header.as_bytes())];
    slices.extend(parts.iter().map(|part| IoSlice::new(part)));
    match device.write_vectored(&slices) {
        Ok(_) => Ok(()),
        // The kernel knows nothing of that file: nothing to forget.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
