//! Where guest RAM lies in a process: `/proc/<pid>/maps`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::process::Process;
use super::{CaptureError, Mapping};

/// What is behind guest RAM, hence what a page reads as that the guest has not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// A private mapping of an image: the image's bytes.
    File,
    /// Anonymous memory: zeroes.
    Anonymous,
}

/// What to look for in a process.
#[derive(Debug, Clone, Copy)]
pub enum Ram<'a> {
    /// Private mappings of this file, each at its place in the image (`memory-backend-file`).
    File(&'a Path),
    /// The one block of anonymous memory of this many bytes (`memory-backend-ram`).
    Anonymous(u64),
}

/// One line of `maps`.
#[derive(Debug, PartialEq, Eq)]
struct Area<'a> {
    start: u64,
    end: u64,
    readable: bool,
    writable: bool,
    shared: bool,
    offset: u64,
    inode: u64,
    path: &'a [u8],
}

impl<'a> Area<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        // "start-end perms offset dev inode", then blanks and the path, which may hold blanks itself.
        let mut fields = line.splitn(6, |&byte| byte == b' ');
        let mut field = || std::str::from_utf8(fields.next()?).ok();
        let (start, end) = field()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end, perms, offset) = (hex(start)?, hex(end)?, field()?.as_bytes(), hex(field()?)?);
        let (_device, inode) = (field()?, field()?.parse().ok()?);
        Some(Self {
            start,
            end,
            readable: perms.first() == Some(&b'r'),
            writable: perms.get(1) == Some(&b'w'),
            shared: perms.get(3) == Some(&b's'),
            offset,
            inode,
            path: fields.next().unwrap_or_default().trim_ascii_start(),
        })
    }

    fn backing(&self) -> Backing {
        // Private huge pages are anonymous; their file is the kernel's own.
        match self.inode == 0 || self.path.starts_with(b"/anon_hugepage") {
            true => Backing::Anonymous,
            false => Backing::File,
        }
    }
}

fn areas(maps: &[u8]) -> impl Iterator<Item = Area<'_>> {
    maps.split(|&byte| byte == b'\n').filter_map(Area::parse)
}

/// Finds the guest RAM of a process. Mappings that touch are one.
///
/// # Errors
/// [`CaptureError::Mapping`] if there is none, or if an anonymous block of that size is not the only one.
pub fn find_mappings(pid: u32, ram: Ram<'_>) -> Result<Vec<Mapping>, CaptureError> {
    let maps = Process::open(pid, None)?.text("maps")?;
    match ram {
        Ram::File(path) => find_file(pid, &maps, path),
        Ram::Anonymous(size) => find_anonymous(pid, &maps, size).map(|found| vec![found]),
    }
}

fn find_file(pid: u32, maps: &[u8], path: &Path) -> Result<Vec<Mapping>, CaptureError> {
    let mut found: Vec<Mapping> = Vec::new();
    for area in areas(maps).filter(|area| !area.shared && is_path(area.path, path.as_os_str())) {
        let next = Mapping { address: area.start, length: area.end - area.start, offset: area.offset };
        match found.last_mut() {
            Some(last) if last.touches(&next) => last.length += next.length,
            _ => found.push(next),
        }
    }
    match found.is_empty() {
        false => Ok(found),
        true => Err(CaptureError::Mapping(format!("process {pid} has no private mapping of {path:?}"))),
    }
}

/// Whether a path as `maps` shows it (line feeds escaped) is the wanted one.
fn is_path(shown: &[u8], wanted: &OsStr) -> bool {
    match wanted.as_bytes().contains(&b'\n') {
        false => shown == wanted.as_bytes(),
        true => shown == wanted.as_bytes().split(|&byte| byte == b'\n').collect::<Vec<_>>().join(&b"\\012"[..]),
    }
}

fn find_anonymous(pid: u32, maps: &[u8], size: u64) -> Result<Mapping, CaptureError> {
    let usable = |area: &Area<'_>| area.readable && area.writable && !area.shared;
    let areas: Vec<Area<'_>> =
        areas(maps).filter(|area| usable(area) && area.backing() == Backing::Anonymous).collect();
    let mut found: Vec<Mapping> = Vec::new();
    for (i, first) in areas.iter().enumerate() {
        // The block may have been split by advice about parts of it, so areas that touch count together.
        let mut end = first.start;
        for area in areas[i..].iter().take_while(|area| area.end - first.start <= size) {
            if area.start != end {
                break;
            }
            end = area.end;
        }
        if end - first.start == size {
            found.push(Mapping { address: first.start, length: size, offset: 0 });
        }
    }
    match found[..] {
        [only] => Ok(only),
        [] => Err(CaptureError::Mapping(format!("process {pid} has no anonymous memory block of {size} bytes"))),
        _ => Err(CaptureError::Mapping(format!(
            "process {pid} has {} anonymous memory blocks of {size} bytes: name the guest's address",
            found.len()
        ))),
    }
}

/// Checks that the process has all of the mappings, private, readable and of one kind, and that those of a file show the part of
/// it that they are said to.
pub fn check(process: &Process, mappings: &[Mapping]) -> Result<Backing, CaptureError> {
    check_text(&process.text("maps")?, mappings)
}

fn check_text(maps: &[u8], mappings: &[Mapping]) -> Result<Backing, CaptureError> {
    let areas: Vec<Area<'_>> = areas(maps).collect();
    let mut backing = None;
    for mapping in mappings {
        let wrong = |what: &str| CaptureError::Mapping(format!("the mapping of guest RAM at {mapping} {what}"));
        let (mut at, end) = (mapping.address, mapping.address + mapping.length);
        let first = areas.partition_point(|area| area.end <= at);
        for area in &areas[first..] {
            if at >= end || area.start > at {
                break;
            }
            if area.shared {
                return Err(wrong("is shared: what the guest wrote cannot be told from the image"));
            }
            if !area.readable {
                return Err(wrong("is not readable"));
            }
            if *backing.get_or_insert(area.backing()) != area.backing() {
                return Err(wrong("is in part a file's and in part anonymous"));
            }
            let shown = area.offset.checked_add(at - area.start);
            if area.backing() == Backing::File && shown != Some(mapping.offset + (at - mapping.address)) {
                return Err(wrong("shows another part of its file"));
            }
            at = area.end;
        }
        if at < end {
            return Err(wrong(&format!("is not there: nothing is mapped at {at:#x}")));
        }
    }
    backing.ok_or_else(|| CaptureError::Invalid("no mappings are given".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000100000 rw-p 00000000 fe:00 42                         /images/a b\\012c
7f0000100000-7f0000200000 r--p 00100000 fe:00 42                         /images/a b\\012c
7f0000200000-7f0000300000 rw-p 00300000 fe:00 42                         /images/a b\\012c
7f1000000000-7f1000100000 rw-p 00000000 00:00 0 
7f1000100000-7f1000180000 rw-p 00000000 00:00 0                          [anon:ram]
7f1000180000-7f1000200000 ---p 00000000 00:00 0 
7f2000000000-7f2000200000 rw-s 00000000 00:01 7                          /memfd:ram (deleted)
7f3000000000-7f3000200000 rw-p 00000000 00:0f 9                          /anon_hugepage (deleted)
";

    fn at(address: u64, length: u64, offset: u64) -> Mapping {
        Mapping { address, length, offset }
    }

    #[test]
    fn mappings_of_a_file_are_found_and_joined() {
        let found = find_file(1, MAPS, Path::new("/images/a b\nc")).expect("there");
        assert_eq!(found, [at(0x7f0000000000, 0x200000, 0), at(0x7f0000200000, 0x100000, 0x300000)]);
        find_file(1, MAPS, Path::new("/images/a")).expect_err("another file");
    }

    #[test]
    fn anonymous_blocks_are_found_by_size() {
        assert_eq!(find_anonymous(1, MAPS, 0x180000).expect("run"), at(0x7f1000000000, 0x180000, 0));
        assert_eq!(find_anonymous(1, MAPS, 0x80000).expect("single"), at(0x7f1000100000, 0x80000, 0));
        assert_eq!(find_anonymous(1, MAPS, 0x200000).expect("huge"), at(0x7f3000000000, 0x200000, 0));
        assert!(find_anonymous(1, MAPS, 0x12345000).is_err());
        let twice = [MAPS, b"7f4000000000-7f4000200000 rw-p 00000000 00:00 0 \n"].concat();
        assert!(find_anonymous(1, &twice, 0x200000).expect_err("two").to_string().contains("2 anonymous"));
    }

    #[test]
    fn mappings_must_be_there_and_of_one_kind() {
        let check = |mappings: &[Mapping]| check_text(MAPS, mappings);
        assert_eq!(check(&[at(0x7f0000001000, 0x150000, 0x1000)]).expect("file"), Backing::File);
        assert_eq!(check(&[at(0x7f1000000000, 0x180000, 0x5000)]).expect("ram"), Backing::Anonymous);
        for (mapping, why) in [
            (at(0x7f1000000000, 0x181000, 0), "not readable"),
            (at(0x7f1000180000, 0x1000, 0), "not readable"),
            (at(0x7f0000000000, 0x301000, 0), "another part"),
            (at(0x7f0000000000, 0x1000, 0x1000), "another part"),
            (at(0x7f0000200000, 0x101000, 0x300000), "nothing is mapped at 0x7f0000300000"),
            (at(0x1000, 0x1000, 0), "nothing is mapped at 0x1000"),
            (at(0x7fff00000000, 0x1000, 0), "nothing is mapped"),
            (at(0x7f2000000000, 0x1000, 0), "shared"),
        ] {
            let error = check(&[mapping]).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        }
        let both = [at(0x7f1000000000, 0x1000, 0), at(0x7f0000000000, 0x1000, 0)];
        assert!(check(&both).expect_err("mixed").to_string().contains("in part"));
        assert!(check(&[]).is_err());
    }

    #[test]
    fn other_text_is_passed_over() {
        for line in ["", "7f00", "zz-7f r--p 0 0 0", "1-2 r", "1-2 r--p 0 00:00 x"] {
            assert_eq!(Area::parse(line.as_bytes()), None);
        }
    }
}
