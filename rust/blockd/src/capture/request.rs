//! What is to be captured.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use overlaybd::{Stack, MAX_VIRTUAL_SIZE};
use serde::{Deserialize, Serialize};

use super::{CaptureError, Method};

/// The most mappings a guest's RAM may be made of.
const MAX_MAPPINGS: usize = 4096;

/// A piece of guest RAM: memory of the VMM, and its place in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mapping {
    /// First byte in the VMM's address space.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// First byte in the image.
    pub offset: u64,
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} ({} bytes, offset {} in the image)", self.address, self.length, self.offset)
    }
}

impl Mapping {
    /// All but the first `len` bytes.
    pub(crate) fn without(self, len: u64) -> Self {
        Self { address: self.address + len, length: self.length - len, offset: self.offset + len }
    }

    /// Checks what is said of guest RAM, as far as that can be done without looking at the process.
    pub(crate) fn check_all(mappings: &[Self], pid: u32, size: u64, page_size: u64) -> Result<(), CaptureError> {
        let invalid = |message: String| Err(CaptureError::Invalid(message));
        if pid == std::process::id() {
            return invalid("the process of the guest is this daemon".into());
        }
        if size == 0 || size > MAX_VIRTUAL_SIZE || size % page_size != 0 {
            return invalid(format!("an image of {size} bytes is not guest RAM: whole pages of {page_size} are"));
        }
        if mappings.is_empty() || mappings.len() > MAX_MAPPINGS {
            return invalid(format!("guest RAM is 1 to {MAX_MAPPINGS} mappings, not {}", mappings.len()));
        }
        for mapping in mappings {
            if [mapping.address, mapping.length, mapping.offset].iter().any(|value| value % page_size != 0) {
                return invalid(format!("the mapping at {mapping} is not of whole pages of {page_size} bytes"));
            }
            // Addresses beyond this are the kernel's.
            if mapping.length == 0 || mapping.address.checked_add(mapping.length).is_none_or(|end| end > 1 << 63) {
                return invalid(format!("the mapping at {mapping} is empty or beyond what a process can have"));
            }
            if mapping.offset.checked_add(mapping.length).is_none_or(|end| end > size) {
                return invalid(format!("the mapping at {mapping} reaches beyond the image of {size} bytes"));
            }
        }
        overlap(mappings, |mapping| mapping.address)
            .map_or(Ok(()), |at| invalid(format!("two mappings both have the address {at:#x}")))?;
        overlap(mappings, |mapping| mapping.offset)
            .map_or(Ok(()), |at| invalid(format!("two mappings both have the offset {at} in the image")))
    }

    /// Whether `next` goes on where this one ends, in memory and in the image.
    pub(super) fn touches(&self, next: &Self) -> bool {
        self.address + self.length == next.address && self.offset + self.length == next.offset
    }
}

/// The image the new layer goes on top of.
#[derive(Clone)]
pub struct Base {
    /// Its layers.
    pub stack: Arc<Stack>,
    /// The lowest of them, which make up the image that the guest maps; the others were made from the guest since it
    /// started. `None`: all of them, or none if the guest's memory is anonymous (a guest that booted cold).
    pub mapped: Option<Arc<Stack>>,
}

/// A capture to be made.
#[derive(Clone)]
pub struct Request {
    /// The VMM.
    pub pid: u32,
    /// Its start time (field 22 of `/proc/<pid>/stat`), to tell it from another process that got its number since.
    pub start_time: Option<u64>,
    /// Guest RAM.
    pub mappings: Vec<Mapping>,
    /// What lies beneath. Without it, or if it has no layers, the layer holds every page a guest with a mapped image wrote, and
    /// every page that is not zero of a guest with anonymous memory.
    pub base: Option<Base>,
    /// The layer's path. Nothing may be there yet.
    pub output: PathBuf,
    /// Size of the image in bytes.
    pub size: u64,
    /// Leave out pages that are as in the base: costs reading the base there.
    pub compare: bool,
    /// Compute the layer's SHA-256.
    pub digest: bool,
    /// Return only when the layer is on stable storage.
    pub durable: bool,
    /// How dirty pages are found. `None`: the fastest way this kernel has.
    pub method: Option<Method>,
}

impl Request {
    /// Checks what can be checked without looking at the process.
    pub(super) fn check(&self, page_size: u64) -> Result<(), CaptureError> {
        Mapping::check_all(&self.mappings, self.pid, self.size, page_size)
    }
}

/// The start of a range that overlaps another, if there is one.
fn overlap(mappings: &[Mapping], start: impl Fn(&Mapping) -> u64) -> Option<u64> {
    let mut ranges: Vec<(u64, u64)> = mappings.iter().map(|m| (start(m), start(m) + m.length)).collect();
    ranges.sort_unstable();
    ranges.windows(2).find(|pair| pair[0].1 > pair[1].0).map(|pair| pair[1].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(size: u64, mappings: &[(u64, u64, u64)]) -> Request {
        let mapping = |&(address, length, offset)| Mapping { address, length, offset };
        Request {
            pid: 1,
            start_time: None,
            mappings: mappings.iter().map(mapping).collect(),
            base: None,
            output: "/tmp/layer".into(),
            size,
            compare: true,
            digest: false,
            durable: false,
            method: None,
        }
    }

    #[test]
    fn hostile_numbers_are_refused() {
        request(0x4000, &[(0x1000, 0x1000, 0), (0x8000, 0x2000, 0x2000)]).check(4096).expect("sound");
        let max = !0xfff;
        for (size, mappings, why) in [
            (0, vec![(0x1000, 0x1000, 0)], "not guest RAM"),
            (0x1001, vec![(0x1000, 0x1000, 0)], "not guest RAM"),
            (max, vec![(0x1000, 0x1000, 0)], "not guest RAM"),
            (0x4000, vec![], "1 to"),
            (0x4000, vec![(0x1000, 0x1000, 0); MAX_MAPPINGS + 1], "1 to"),
            (0x4000, vec![(0x1001, 0x1000, 0)], "whole pages"),
            (0x4000, vec![(0x1000, 0x1001, 0)], "whole pages"),
            (0x4000, vec![(0x1000, 0x1000, 1)], "whole pages"),
            (0x4000, vec![(0x1000, 0, 0)], "empty or beyond"),
            (0x4000, vec![(max, 0x2000, 0)], "empty or beyond"),
            (0x4000, vec![(0x1000, max, 0)], "empty or beyond"),
            (0x4000, vec![(0x1000, 0x2000, max)], "beyond the image"),
            (0x4000, vec![(0x1000, 0x2000, 0x3000)], "beyond the image"),
            (0x4000, vec![(0x2000, 0x2000, 0), (0x1000, 0x2000, 0x2000)], "both have the address"),
            (0x4000, vec![(0x1000, 0x2000, 0), (0x9000, 0x2000, 0x1000)], "both have the offset"),
        ] {
            let error = request(size, &mappings).check(4096).expect_err(why).to_string();
            assert!(error.contains(why), "{error} for {why}");
        }
        let own = Request { pid: std::process::id(), ..request(0x1000, &[(0x1000, 0x1000, 0)]) };
        assert!(own.check(4096).expect_err("own").to_string().contains("this daemon"));
    }
}
