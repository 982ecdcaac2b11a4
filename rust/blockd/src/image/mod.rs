//! Attached images and what can be done with them.

mod ahead;
mod attached;
mod files;
mod gate;
mod handles;
mod layers;
mod make;
mod recorder;
mod recover;
mod seal;
mod spec;
mod table;
mod transfer;
mod upper;

pub use attached::{Attached, Counters, Manner, Seek};
pub use files::remove as remove_file;
pub use gate::{Gate, Turn, WaitingRead};
pub use handles::Handles;
pub use layers::{open_file, FilesOnly, LayerSources, Layers};
pub use make::{compact, compact_run, CompactRun, Made, Output};
pub use recorder::{prefetch, Recorder, WorkingSet};
pub use seal::{finish_later, seal, Sealed};
pub use spec::{check_name, check_path, Codec, LayerSpec, Owner, UpperMode, UpperSpec, ZFileSpec};
pub use table::{Reservation, Table};
pub use transfer::{export, import, Format, View};
pub use upper::UpperDir;
